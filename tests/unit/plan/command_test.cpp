// zinf plan as a person meets it: output, JSON, bad input, exit codes.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>

namespace zinf {
namespace {

struct Outcome {
  int code = -1;
  std::string text;  // of standard output and standard error
};

Outcome run(const std::string& arguments) {
  const std::string command =
      std::string(ZINF_COMMAND) + " plan " + arguments + " 2>&1";
  Outcome outcome;
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return outcome;
  std::array<char, 4096> buffer{};
  while (std::fgets(buffer.data(), buffer.size(), pipe) != nullptr)
    outcome.text += buffer.data();
  outcome.code = WEXITSTATUS(pclose(pipe));
  return outcome;
}

constexpr const char* kModel =
    "--layers 32 --hidden 4096 --heads 32 --vocab 32000 ";

TEST(PlanCommand, PrintsATableForPeople) {
  const Outcome out =
      run(std::string(kModel) +
          "--cluster rtx4090-workstation --batch 4 --tokens 1e9 "
          "--price 0.4");
  EXPECT_EQ(out.code, 0) << out.text;
  for (const char* words :
       {"6.57 billion parameters", "optimizer states", "there is", "tokens/s",
        "bound by", "bytes/parameter", "1 billion tokens take", "cost"})
    EXPECT_NE(out.text.find(words), std::string::npos) << words << out.text;
}

TEST(PlanCommand, PrintsOneJsonObject) {
  const Outcome out = run(std::string(kModel) + "--cluster dgx-a100 --json");
  ASSERT_EQ(out.code, 0) << out.text;
  const auto json = nlohmann::json::parse(out.text);
  EXPECT_TRUE(json["fits"]);
  EXPECT_GT(json["step_seconds"], 0);
  EXPECT_GT(json["tokens_per_second"], 0);
  EXPECT_EQ(json["tiers"].size(), 3u);
  EXPECT_EQ(json["lanes"].size(), 8u);
}

TEST(PlanCommand, SweepsOneValue) {
  const Outcome out = run(std::string(kModel) +
                          "--cluster rtx4090-workstation --what-if "
                          "device_memory=1MB,24GB,80GB --json");
  ASSERT_EQ(out.code, 0) << out.text;
  const auto sweep = nlohmann::json::parse(out.text)["sweep"];
  ASSERT_EQ(sweep.size(), 3u);
  EXPECT_FALSE(sweep[0]["fits"]);
  EXPECT_EQ(sweep[2]["value"], "80GB");
  EXPECT_LE(sweep[2]["step_seconds"], sweep[1]["step_seconds"]);
}

TEST(PlanCommand, ASweepOfWhichNothingFitsIsAFailure) {
  const Outcome out = run(std::string(kModel) +
                          "--cluster rtx4090-workstation --what-if "
                          "host_memory=1MB,2MB");
  EXPECT_EQ(out.code, 1) << out.text;
  EXPECT_NE(out.text.find("none of them fits"), std::string::npos) << out.text;
}

TEST(PlanCommand, LargeNumbersAreWrittenForPeople) {
  const Outcome out = run(std::string(kModel) +
                          "--cluster rtx4090-workstation --tokens 1e12 "
                          "--price 2.5");
  EXPECT_EQ(out.code, 0) << out.text;
  EXPECT_EQ(out.text.find("e+"), std::string::npos) << out.text;
  EXPECT_NE(out.text.find(" years and cost "), std::string::npos) << out.text;
}

TEST(PlanCommand, WhatDoesNotFitIsAFailure) {
  const Outcome out =
      run("--layers 2000 --hidden 25600 --cluster rtx4090-workstation");
  EXPECT_EQ(out.code, 1);
  EXPECT_NE(out.text.find("are missing"), std::string::npos) << out.text;
  EXPECT_NE(out.text.find("would help"), std::string::npos) << out.text;
}

TEST(PlanCommand, ThePaperIsPrintedBesideOurs) {
  const Outcome out = run("--paper --json");
  ASSERT_EQ(out.code, 0) << out.text;
  EXPECT_EQ(nlohmann::json::parse(out.text)["tables"].size(), 12u);
  EXPECT_NE(run("--paper").text.find("figure 6e"), std::string::npos);
  EXPECT_NE(run("--beyond").text.find("20T on 512"), std::string::npos);
}

TEST(PlanCommand, ThisMachineIsMeasured) {
  const Outcome out = run("--layers 2 --hidden 256 --cluster this --json");
  ASSERT_EQ(out.code, 0) << out.text;
  const auto json = nlohmann::json::parse(out.text);
  EXPECT_EQ(json["cluster"], "this machine");
  EXPECT_GT(json["tokens_per_second"], 0);
}

TEST(PlanCommand, BadInputIsTold) {
  struct Bad {
    const char* arguments;
    const char* words;
  };
  for (const Bad& bad : {
           Bad{"--cluster gh200", "no model"},
           Bad{"--layers 0 --hidden 64 --cluster gh200", "no layers"},
           Bad{"--layers 4 --hidden 10 --heads 3 --cluster gh200",
               "3 heads that do not divide"},
           Bad{"x.json --layers 4 --cluster gh200", "contradict"},
           Bad{"--layers 4 --hidden 64 --cluster gh20", "did you mean gh200?"},
           Bad{"--layers 4 --hidden 64 --cluster gh200 --batch 0",
               "the batch must be above 0"},
           Bad{"--layers 4 --hidden 64 --cluster gh200 --batch=-1",
               "must be from 0"},
           Bad{"--layers 4 --hidden 64 --cluster gh200 --micro-batches 9",
               "more micro-batches"},
           Bad{"--layers 4 --hidden 64 --cluster gh200 --host-memory 4G",
               "\"4GB\" (decimal)"},
           Bad{"--layers 4 --hidden 64 --cluster gh200 --precision bf61",
               "unknown precision"},
           Bad{"--layers 4 --hidden 64 --cluster gh200 --what-if x",
               "write a name"},
           Bad{"--layers 9999999999999 --hidden 9999999999999 --cluster gh200",
               "10^18"},
           Bad{"--layers 99999999999999999999 --hidden 1 --cluster gh200",
               "10^18"},
           Bad{"--layers -1 --hidden 64 --cluster gh200",
               "--layers -1: it cannot be negative"},
           Bad{"--layers=-1 --hidden 64 --cluster gh200",
               "\"-1\" must be a whole number"},
           Bad{"--layers 1.5 --hidden 64 --cluster gh200",
               "\"1.5\" must be a whole number"},
           Bad{"--layers 4 --hidden 64 --paper --what-if batch=1,2",
               "--paper prints tables"},
           Bad{"--paper --what-if batch=1,2", "contradict"},
           Bad{"--paper --beyond", "contradict each other"},
           Bad{"--paper --cluster gh200", "--cluster, --what-if"},
           Bad{"--layers 4 --hidden 64 --cluster gh200 --nodes 2 "
               "--network-rate 25Gb/s",
               "bits? Say bytes per second"},
           Bad{"model-00001-of-00003.safetensors --cluster gh200",
               "name its config.json"},
           Bad{"--layers 4 --hidden 64 --cluster gh200 --path .",
               "--path is for --cluster this"},
           Bad{"--layers 4 --hiden 64", "did you mean --hidden?"},
       }) {
    const Outcome out = run(bad.arguments);
    EXPECT_EQ(out.code, 2) << bad.arguments << ": " << out.text;
    EXPECT_NE(out.text.find(bad.words), std::string::npos)
        << bad.arguments << ": " << out.text;
  }
  const Outcome missing = run("/nonexistent/config.json --cluster gh200");
  EXPECT_EQ(missing.code, 1);
  EXPECT_NE(missing.text.find("No such file"), std::string::npos);
}

}  // namespace
}  // namespace zinf
