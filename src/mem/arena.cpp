#include "zinf/arena.h"

#include <utility>

#include "src/base/check.h"
#include "src/mem/arena_core.h"
#include "src/mem/arena_registry.h"

namespace zinf {

Result<Arena> Arena::create(ArenaOptions options) {
  ZINF_ASSIGN(ArenaCore * core, arena_registry::create(std::move(options)));
  return Arena(core);
}

Arena::Arena(Arena&& other) noexcept
    : core_(std::exchange(other.core_, nullptr)) {}

Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(core_, other.core_);
  return *this;
}

Arena::~Arena() {
  if (core_ != nullptr) arena_registry::release(core_);
}

void* Arena::allocate(std::size_t bytes, std::size_t alignment) {
  return core_->allocate(bytes, alignment);
}

Result<void*> Arena::try_allocate(std::size_t bytes, std::size_t alignment) {
  return core_->try_allocate(bytes, alignment, OnRefusal::kFail);
}

Result<void*> Arena::allocate_beyond_budget(std::size_t bytes,
                                            std::size_t alignment) {
  return core_->try_allocate(bytes, alignment, OnRefusal::kExceed);
}

void Arena::free(void* block) {
  ArenaCore* core = arena_registry::find(block);
  if (core == nullptr) [[unlikely]] {
    ZINF_CHECK(block == nullptr, "free of %p: it is in no arena", block);
    return;
  }
  core->free(block);
}

bool Arena::owns(const void* address) const {
  return arena_registry::find(address) == core_;
}

std::size_t Arena::trim() { return core_->trim(); }
std::size_t Arena::compact(std::size_t bytes) { return core_->compact(bytes); }
ArenaStats Arena::stats() const { return core_->stats(); }

}  // namespace zinf
