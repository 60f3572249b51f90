#include "zinf/engine.h"

#include <exception>

#include "adapters/torch/api/adamw_impl.h"
#include "adapters/torch/api/checkpoint.h"
#include "adapters/torch/api/engine_impl.h"
#include "adapters/torch/api/live.h"
#include "adapters/torch/engine.h"
#include "adapters/torch/error.h"
#include "adapters/torch/manager.h"
#include "zinf/log.h"

namespace zinf {

Init::Init(std::shared_ptr<EngineImpl> impl) : impl_(std::move(impl)) {
  impl_->begin_init();
}

Init::~Init() {
  try {
    end();
  } catch (const std::exception& error) {
    log(LogLevel::kError, "the end of engine.init(): %s", error.what());
  }
}

void Init::end() {
  if (std::shared_ptr<EngineImpl> impl = std::move(impl_)) impl->end_init();
}

Engine::Engine(const EngineOptions& options)
    : impl_(std::make_shared<EngineImpl>(options)) {
  note_engine(impl_);
}

Engine::~Engine() {
  try {
    impl_->tell_of_exception();
    impl_->close(Ending::kKeepWhatFits);
  } catch (const std::exception& error) {
    log(LogLevel::kError, "closing an engine: %s", error.what());
  }
}

Init Engine::init() { return Init(impl_); }

void Engine::adopt(torch::nn::Module& model) { impl_->adopt(model); }

void Engine::release(torch::nn::Module& model) { impl_->release(model); }

void Engine::close() { impl_->close(Ending::kKeepAll); }

void Engine::close_and_discard() { impl_->close(Ending::kDiscard); }

int Engine::rank() const { return impl_->rank(); }

int Engine::ranks() const { return impl_->num_ranks(); }

EngineStats Engine::stats() const { return engine_stats(*impl_->manager()); }

Need Engine::probe(const std::function<void()>& step) {
  impl_->check_open();
  if (step == nullptr) refuse("probe() takes a function that runs a step");
  return impl_->probe(step);
}

// Python's are split too: zinf/_parts.py.
static void check_not_split(const char* what, Manager& manager) {
  if (manager.ranks() == nullptr) return;
  throw Error(Status::error(
      Code::kUnsupported,
      std::string(what) + " in C++ does not work with several ranks yet"));
}

void Engine::save(const std::string& path, const c10::IValue& extra) {
  impl_->check_open();
  check_not_split("save()", *impl_->manager());
  save_checkpoint(path, impl_->models(), impl_->optimizers(), extra);
}

Loaded Engine::load(const std::string& path, const LoadOptions& options) {
  impl_->check_open();
  check_not_split("load()", *impl_->manager());
  if (!options.only.empty() && options.only != "weights") {
    refuse("only is \"" + options.only + "\", must be \"weights\" or nothing");
  }
  auto load = options.only.empty() ? load_checkpoint : load_weights;
  Manager& manager = *impl_->manager();
  std::string failure = manager.heal();
  if (!failure.empty() && options.only == "weights") {
    manager.abandon_updates();
    for (AdamW* optimizer : impl_->optimizers()) {
      // Its states may be of an older step.
      std::string& its_failure = AdamWImpl::of(*optimizer).failure;
      if (its_failure.empty()) its_failure = failure;
    }
  }
  bool begun = false;
  try {
    return load(path, impl_->models(), impl_->optimizers(), manager, begun);
  } catch (...) {
    // What is half loaded is not used, nor what had failed before.
    if (begun) failure = unfinished(path);
    if (!failure.empty()) manager.fail(failure);
    throw;
  }
}

}  // namespace zinf
