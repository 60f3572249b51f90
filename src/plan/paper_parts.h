// The parts of paper_tables(), and what they share.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "zinf/paper.h"
#include "zinf/setup.h"
#include "zinf/status.h"

namespace zinf::plan {

// A model of the paper: 12 hidden^2 parameters per block and nothing else.
ModelShape paper_model(const std::string& name, std::uint64_t layers,
                       std::uint64_t hidden, std::uint64_t heads = 0);

// So many DGX-2 nodes; 4 devices are a part of one.
Cluster dgx2(std::uint64_t nodes);
Cluster part_of_dgx2(std::uint64_t devices);

// The paper's engine on this model.
Setup paper_setup(const ModelShape& shape, const Cluster& cluster, double batch,
                  std::uint64_t model_parallel = 1);

// Activations stay on the device if it holds them too, else they go to the
// host.
void settle_activations(Setup& setup);
// Weights, gradients and states each go to the first tier that holds them.
void settle_states(Setup& setup);
// Whether every tier holds what is put there.
bool fits(const Setup& setup);

PaperTable zero_table_1();
PaperTable figure_2a();
PaperTable figure_3();
PaperTable table_3();
PaperTable figure_1();
PaperTable figure_6a();
Result<PaperTable> figure_5a();
Result<PaperTable> figure_5b();
Result<PaperTable> figure_5c();
Result<PaperTable> figure_6c();
Result<PaperTable> figure_6d();
Result<PaperTable> figure_6e();

}  // namespace zinf::plan
