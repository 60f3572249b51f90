#include "src/mem/arena_registry.h"

#include <pthread.h>

#include <mutex>

#include "src/base/mutex.h"
#include "src/base/strf.h"

namespace zinf::arena_registry {

constinit Entry entries[kMaxArenas];

namespace {

// Never destroyed: blocks may be freed by other static destructors.
Mutex& registry_mutex() {
  static Mutex& mutex = *new Mutex;
  return mutex;
}

std::uint64_t next_generation = 1;  // guarded by registry_mutex()

constinit thread_local bool thread_is_ending = false;

template <typename Body>
void for_each_core_locked(const Body& body) {
  for (Entry& entry : entries) {
    ArenaCore* core = entry.core.load(std::memory_order_relaxed);
    if (core != nullptr) body(entry, *core);
  }
}

void sweep_locked() {
  for_each_core_locked([](Entry& entry, ArenaCore& core) {
    if (!core.is_dead()) return;
    entry.range.store(0, std::memory_order_relaxed);
    entry.core.store(nullptr, std::memory_order_relaxed);
    delete &core;
  });
}

struct ThreadExit {
  ~ThreadExit() {
    thread_is_ending = true;
    MutexLock lock(registry_mutex());
    for (std::size_t i = 0; i < kMaxArenas; ++i) {
      ArenaCore* core = entries[i].core.load(std::memory_order_relaxed);
      CacheSlot slot = std::exchange(thread_slots[i], CacheSlot{});
      if (core != nullptr && slot.generation == core->birth_generation()) {
        core->retire(slot.cache);
      }
    }
    sweep_locked();
  }
};

// Note [Fork]. All locks are held over a fork, so the child finds the heaps
// whole. Caches of threads that do not exist in the child may be torn; nobody
// takes them, the child loses the at most 5 MiB in each.
void before_fork() ZINF_THREAD_ANNOTATION(no_thread_safety_analysis) {
  registry_mutex().lock();
  for_each_core_locked([](Entry&, ArenaCore& core) { core.lock_for_fork(); });
}

void after_fork() ZINF_THREAD_ANNOTATION(no_thread_safety_analysis) {
  for_each_core_locked(
      [](Entry&, ArenaCore& core) { core.unlock_after_fork(); });
  registry_mutex().unlock();
}

void after_fork_in_child() ZINF_THREAD_ANNOTATION(no_thread_safety_analysis) {
  for_each_core_locked(
      [](Entry&, ArenaCore& core) { core.forget_other_threads(); });
  after_fork();
}

}  // namespace

Result<ArenaCore*> create(ArenaOptions options) {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(before_fork, after_fork, after_fork_in_child);
  });
  MutexLock lock(registry_mutex());
  sweep_locked();
  for (std::size_t slot = 0; slot < kMaxArenas; ++slot) {
    Entry& entry = entries[slot];
    if (entry.core.load(std::memory_order_relaxed) != nullptr) continue;
    ZINF_ASSIGN(std::unique_ptr<ArenaCore> core,
                ArenaCore::create(std::move(options), slot, next_generation++));
    entry.core.store(core.get(), std::memory_order_relaxed);
    entry.range.store(Entry::pack(core->base(), core->reserved_bytes()),
                      std::memory_order_relaxed);
    return core.release();
  }
  return Status::error(
      Code::kUnsupported,
      strf("arena: %zu exist already (an arena whose blocks are live counts "
           "even when it was dropped)",
           kMaxArenas));
}

void release(ArenaCore* core) {
  core->orphan();
  sweep();
}

void sweep() {
  MutexLock lock(registry_mutex());
  sweep_locked();
}

bool watch_thread_exit() {
  if (thread_is_ending) return false;
  [[maybe_unused]] static thread_local ThreadExit at_exit;
  return true;
}

}  // namespace zinf::arena_registry
