#include "cli/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "src/base/strf.h"
#include "zinf/bytes.h"

namespace zinf::cli {

Progress::Progress(std::string label, std::uint64_t total, Unit unit)
    : label_(std::move(label)),
      total_(std::max<std::uint64_t>(total, 1)),
      unit_(unit),
      shown_(isatty(STDERR_FILENO) == 1),
      begin_(Clock::now()) {}

Progress::~Progress() {
  if (shown_) std::fputs("\r\033[K", stderr);
}

void Progress::set_label(std::string label) { label_ = std::move(label); }

void Progress::update(std::uint64_t done) {
  Clock::time_point now = Clock::now();
  if (!shown_ || now - drawn_ < std::chrono::milliseconds(100)) return;
  drawn_ = now;
  constexpr int kWidth = 24;
  double share =
      std::min(1.0, static_cast<double>(done) / static_cast<double>(total_));
  double seconds = std::chrono::duration<double>(now - begin_).count();
  std::string bar(static_cast<std::size_t>(share * kWidth), '#');
  bar.resize(kWidth, '-');
  std::string rate =
      unit_ == Unit::kBytes
          ? format_rate(static_cast<double>(done) / seconds)
          : strf("%llu of %llu", static_cast<unsigned long long>(done),
                 static_cast<unsigned long long>(total_));
  auto left = static_cast<long>(share > 0 ? seconds / share - seconds : 0);
  std::fprintf(stderr, "\r%-22s [%s] %3.0f%%  %s  %ld:%02ld left\033[K",
               label_.c_str(), bar.c_str(), share * 100, rate.c_str(),
               left / 60, left % 60);
  std::fflush(stderr);
}

}  // namespace zinf::cli
