// A range of addresses from the kernel, private and anonymous.
#pragma once

#include <cstddef>
#include <utility>

#include "zinf/status.h"

namespace zinf {

// Owns the mapping. Move-only. One at a time; the memory itself is anybody's.
class VirtualRange {
 public:
  VirtualRange() = default;
  VirtualRange(VirtualRange&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)) {}
  VirtualRange& operator=(VirtualRange&& other) noexcept;
  ~VirtualRange();
  VirtualRange(const VirtualRange&) = delete;
  VirtualRange& operator=(const VirtualRange&) = delete;

  // Addresses without memory: touching them is a fault until make_writable().
  static Result<VirtualRange> reserve(std::size_t bytes, std::size_t alignment);

  // Readable and writable zeroes, backed by memory as it is touched.
  static Result<VirtualRange> allocate(std::size_t bytes,
                                       std::size_t alignment);

  std::byte* base() const { return base_; }
  std::size_t bytes() const { return bytes_; }

  Status make_writable(std::size_t offset, std::size_t bytes);

  // Asks for huge pages; a system without them says no and nothing is lost.
  void advise_huge(std::size_t offset, std::size_t bytes);

  // Refuses huge pages, so that a part of one stays given back. False when the
  // system cannot keep one more range apart; then nothing has changed.
  [[nodiscard]] bool advise_small(std::size_t offset, std::size_t bytes);

  // Gives the memory back; the addresses stay and read as zeroes.
  void discard(std::size_t offset, std::size_t bytes);
  // The same for a part of a huge page: the kernel would keep its memory until
  // memory is short, unless it is told to split the page first.
  void discard_part(std::size_t offset, std::size_t bytes);

  // Gives the memory and the addresses behind the first `bytes` back.
  void shrink(std::size_t bytes);

 private:
  VirtualRange(std::byte* base, std::size_t bytes)
      : base_(base), bytes_(bytes) {}
  static Result<VirtualRange> map(std::size_t bytes, std::size_t alignment,
                                  int protection);

  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
};

// How many bytes of addresses it is decent to reserve: four times the physical
// memory, but at most half of what RLIMIT_AS leaves.
std::size_t decent_reserve_bytes();

}  // namespace zinf
