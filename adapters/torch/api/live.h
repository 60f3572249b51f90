// The engines and optimizers of this process: save() and load() take the
// optimizers of an engine's parameters, and step() the engines of its own.
#pragma once

#include <memory>
#include <vector>

namespace zinf {

class AdamW;
class EngineImpl;
class Manager;

// Thread-safe, in the order of their making. An optimizer takes itself out
// before it ends.
void note_optimizer(AdamW* optimizer);
void forget_optimizer(AdamW* optimizer);
std::vector<AdamW*> live_optimizers();

// At the end of the process the files of those that still live are removed.
void note_engine(const std::shared_ptr<EngineImpl>& engine);
// The engine of a manager, or null.
std::shared_ptr<EngineImpl> engine_of(const Manager* manager);

}  // namespace zinf
