// Units that are about to be used at once, for who moves them ahead.
#pragma once

#include <c10/util/SmallVector.h>

#include <cstdint>

#include "adapters/torch/unit.h"
#include "zinf/trace.h"

namespace zinf {

// One thread.
class Announcement {
 public:
  void add(Unit& unit, Use use);
  void add(Unit& unit, UseKind kind);
  void make();

 private:
  void add_on_device(Unit& unit, UseKind kind);
  HostTier* tier_ = nullptr;
  GatherTier* gather_ = nullptr;
  c10::SmallVector<StateUse, 8> uses_;
  c10::SmallVector<StateUse, 8> wholes_;
  Manager* device_ = nullptr;  // whose are these
  c10::SmallVector<StateUse, 8> on_device_;
  std::uint64_t on_device_bytes_ = 0;
};

}  // namespace zinf
