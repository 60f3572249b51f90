// Writes the seeds of every target: store_corpus DIRECTORY makes
// DIRECTORY/TARGET/N.
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "tests/fuzz/store_target.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "store_corpus DIRECTORY\n");
    return 2;
  }
  for (const zinf::tier::FuzzTarget& target : zinf::tier::fuzz_targets()) {
    std::filesystem::path directory =
        std::filesystem::path(argv[1]) / target.name;
    std::filesystem::create_directories(directory);
    int number = 0;
    for (const zinf::tier::Bytes& seed : target.seeds()) {
      std::ofstream file(directory / std::to_string(number++),
                         std::ios::binary);
      file.write(reinterpret_cast<const char*>(seed.data()),
                 static_cast<std::streamsize>(seed.size()));
    }
  }
  return 0;
}
