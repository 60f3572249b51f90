// Anonymous memory on huge pages where the system gives them.
#pragma once

#include <cstddef>
#include <span>
#include <utility>

#include "zinf/status.h"

namespace zinf {

// Move-only; 2 MiB aligned, zeroed and touched, so that no page fault is left.
class Mapping {
 public:
  // kOverBudget when it is more than the machine has available, or than the
  // system gives.
  static Result<Mapping> create(std::size_t bytes);

  Mapping() = default;
  ~Mapping();
  Mapping(Mapping&& other) noexcept { *this = std::move(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(mapping_, other.mapping_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  std::span<std::byte> span() const;

 private:
  Mapping(void* mapping, std::size_t bytes)
      : mapping_(mapping), bytes_(bytes) {}

  void* mapping_ = nullptr;  // 2 MiB longer than bytes_, to be aligned in
  std::size_t bytes_ = 0;
};

}  // namespace zinf
