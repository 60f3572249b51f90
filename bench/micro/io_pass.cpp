// One measurement of the I/O library for io_vs_fio.py: moves FILE a number of
// times in one direction and prints one JSON line. FILE's content is lost.
//
//   io_pass FILE read|write|mix BLOCK DEPTH PASSES [BACKEND]
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "zinf/bytes.h"
#include "zinf/io_bench.h"

namespace zinf::io {
namespace {

Result<Direction> parse_direction(std::string_view text) {
  if (text == "read") return Direction::kRead;
  if (text == "write") return Direction::kWrite;
  if (text == "mix") return Direction::kMix;
  return Status::error(Code::kInvalid, "direction: read, write or mix");
}

Status measure(int argc, char** argv) {
  if (argc < 6) {
    return Status::error(Code::kInvalid,
                         "io_pass FILE read|write|mix BLOCK DEPTH PASSES");
  }
  ZINF_ASSIGN(Direction direction, parse_direction(argv[2]));
  ZINF_ASSIGN(std::uint64_t block, parse_bytes(argv[3]));
  ZINF_ASSIGN(Backend backend, parse_backend(argc > 6 ? argv[6] : "auto"));
  Options options{
      .backend = backend, .block_bytes = block, .depth = std::atoi(argv[4])};
  ZINF_ASSIGN(Bench bench, Bench::on_file(argv[1]));
  ZINF_TRY(bench.open(options));
  Sample total;
  for (int pass = std::atoi(argv[5]); pass > 0; --pass) {
    ZINF_ASSIGN(Sample sample, bench.run(direction));
    total.seconds += sample.seconds;
    total.cpu_seconds += sample.cpu_seconds;
    total.bytes += sample.bytes;
  }
  ZINF_TRY(bench.verify());
  std::printf("{\"gbps\": %.4f, \"cpu_per_gb\": %.5f, \"backend\": \"%s\"}\n",
              total.gbps(),
              total.cpu_seconds / (static_cast<double>(total.bytes) / 1e9),
              backend_name(bench.io().backend()).data());
  return {};
}

}  // namespace
}  // namespace zinf::io

int main(int argc, char** argv) {
  zinf::Status status = zinf::io::measure(argc, argv);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.text().c_str());
  return status.ok() ? 0 : 1;
}
