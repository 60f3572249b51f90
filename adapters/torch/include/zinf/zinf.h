// Trains any torch::nn module on the memory that you have.
//
//   zinf::Engine engine({.host_memory = "4GB", .nvme = "/mnt/nvme"});
//   Model model = nullptr;
//   {
//     auto init = engine.init();
//     model = Model(config);
//   }
//   engine.adopt(model);
//   zinf::AdamW optimizer(model->parameters(), 3e-4);
//
// and then the usual training loop. Names and behaviour are those of Python's
// zinf (docs/cpp.md). Failures are exceptions: zinf::Error.
#pragma once

#include "zinf/engine.h"
#include "zinf/engine_stats.h"
#include "zinf/error.h"
#include "zinf/need.h"
#include "zinf/optim.h"
#include "zinf/version.h"
