// Page-aligned memory with a pattern in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>

namespace zinf {

class Buffer {
 public:
  explicit Buffer(std::size_t bytes, std::uint64_t seed = 0)
      : bytes_(bytes),
        data_(static_cast<std::byte*>(
            std::aligned_alloc(4096, (bytes / 4096 + 1) * 4096))) {
    fill(seed);
  }

  std::span<std::byte> span() { return {data_.get(), bytes_}; }
  std::byte* data() { return data_.get(); }
  std::size_t size() const { return bytes_; }

  void fill(std::uint64_t seed) {
    std::uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
    for (std::byte& value : span()) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      value = static_cast<std::byte>(state >> 56);
    }
  }

  bool operator==(const Buffer& other) const {
    return bytes_ == other.bytes_ &&
           std::equal(data_.get(), data_.get() + bytes_, other.data_.get());
  }

 private:
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  std::size_t bytes_;
  std::unique_ptr<std::byte, Free> data_;
};

}  // namespace zinf
