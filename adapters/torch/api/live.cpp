#include "adapters/torch/api/live.h"

#include <cstdlib>
#include <mutex>

#include "adapters/torch/api/engine_impl.h"
#include "adapters/torch/manager.h"

namespace zinf {
namespace {

struct Live {
  std::mutex mutex;
  std::vector<AdamW*> optimizers;
  std::vector<std::weak_ptr<EngineImpl>> engines;
};

// Never destroyed: engines and optimizers may be static objects themselves.
Live& live() {
  static Live& live = *new Live;
  return live;
}

std::vector<std::shared_ptr<EngineImpl>> live_engines() {
  std::lock_guard lock(live().mutex);
  std::vector<std::shared_ptr<EngineImpl>> engines;
  std::erase_if(live().engines, [&](const auto& weak) {
    auto engine = weak.lock();
    if (engine) engines.push_back(engine);
    return engine == nullptr;
  });
  return engines;
}

void end_updates() {
  for (const auto& engine : live_engines()) {
    engine->manager()->wait_for_updates();
  }
}

}  // namespace

void note_optimizer(AdamW* optimizer) {
  std::lock_guard lock(live().mutex);
  live().optimizers.push_back(optimizer);
}

void forget_optimizer(AdamW* optimizer) {
  std::lock_guard lock(live().mutex);
  std::erase(live().optimizers, optimizer);
}

std::vector<AdamW*> live_optimizers() {
  std::lock_guard lock(live().mutex);
  return live().optimizers;
}

void note_engine(const std::shared_ptr<EngineImpl>& engine) {
  static const int once = std::atexit(&end_updates);
  (void)once;
  std::lock_guard lock(live().mutex);
  live().engines.push_back(engine);
}

std::shared_ptr<EngineImpl> engine_of(const Manager* manager) {
  for (auto& engine : live_engines()) {
    if (engine->manager().get() == manager) return engine;
  }
  return nullptr;
}

}  // namespace zinf
