#include "src/engine/wear.h"

#include <sys/stat.h>
#include <sys/statvfs.h>

#include <set>

namespace zinf {
namespace {

constexpr double kDaysOfYear = 365;
constexpr double kDriveWritesPerDay = 0.3;
constexpr double kRatedYears = 5;

}  // namespace

std::uint64_t default_endurance(const std::vector<NvmePath>& paths) {
  double bytes = 0;
  std::set<dev_t> drives;
  for (const NvmePath& path : paths) {
    struct stat info{};
    struct statvfs disk{};
    if (stat(path.path.c_str(), &info) != 0 ||
        statvfs(path.path.c_str(), &disk) != 0 ||
        !drives.insert(info.st_dev).second) {
      continue;
    }
    bytes +=
        static_cast<double>(disk.f_blocks) * static_cast<double>(disk.f_frsize);
  }
  return static_cast<std::uint64_t>(bytes * kDriveWritesPerDay * kDaysOfYear *
                                    kRatedYears);
}

void Wear::count_step(std::uint64_t bytes_written, Time now) {
  last_ = {bytes_written, now};
  if (steps_++ == 0) first_ = last_;
}

WearStats Wear::stats() const {
  WearStats stats{.steps = steps_, .endurance_bytes = endurance_};
  if (steps_ == 0) return stats;
  if (steps_ == 1) {
    stats.bytes_per_step = last_.bytes;
    return stats;
  }
  std::uint64_t bytes = last_.bytes - first_.bytes;
  stats.bytes_per_step = bytes / (steps_ - 1);
  std::chrono::duration<double, std::ratio<86400>> days =
      last_.time - first_.time;
  if (days.count() > 0) {
    stats.tb_per_day = static_cast<double>(bytes) / days.count() / 1e12;
  }
  if (endurance_ > 0) {
    stats.life_per_day =
        stats.tb_per_day * 1e12 / static_cast<double>(endurance_);
    stats.life_per_year = stats.life_per_day * kDaysOfYear;
  }
  return stats;
}

}  // namespace zinf
