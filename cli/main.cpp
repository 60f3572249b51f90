// zinf: one command for people. Exit code 0: done; 1: it failed; 2: the command
// line makes no sense.
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <exception>

#include "cli/command.h"

namespace zinf::cli {
namespace {

int exit_code(const Status& status) {
  if (status.ok()) return 0;
  // An EINVAL of the system is a failure, not a wrong command line.
  bool usage = status.code() == Code::kInvalid && status.errnum() == 0;
  return usage ? 2 : 1;
}

// A report that did not reach its file is a failure.
Status flush_output() {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return {};
  return Status::system("write", "standard output", errno);
}

int run(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file-size limit is an error like others
  Result<std::function<Status()>> action = parse_arguments(argc, argv);
  Status status = action.ok() ? action.value()() : action.status();
  if (Status output = flush_output(); status.ok()) status = output;
  if (!status.ok()) std::fprintf(stderr, "zinf: %s\n", status.text().c_str());
  return exit_code(status);
}

}  // namespace
}  // namespace zinf::cli

int main(int argc, char** argv) {
  // The last resort: nothing below throws for a reason that a user can cause.
  try {
    return zinf::cli::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "zinf: internal error: %s\n", error.what());
    return 1;
  }
}
