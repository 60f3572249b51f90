#include "cli/command.h"

namespace zinf::cli {

void add_io(CLI::App& app, Chosen& chosen) {
  CLI::App* io = app.add_subcommand("io", "Measure and tune a disk");
  io->require_subcommand(1);
  add_bench(*io, chosen);
  add_tune(*io, chosen);
}

}  // namespace zinf::cli
