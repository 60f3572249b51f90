// The shape of a transformer, and what follows from it by arithmetic alone.
//
// The formulas are those of ZeRO-Infinity, section 3 (symbols there: nl layers,
// hd hidden, bsz batch, seq). They count the four linear maps of a block and
// nothing else: 12 hidden^2 parameters. A shape that is read from a model's
// configuration knows its own numbers instead.
#pragma once

#include <cstdint>
#include <string>

#include "zinf/status.h"

namespace zinf::plan {

struct ModelShape {
  std::string name = {};
  std::uint64_t layers = 0;
  std::uint64_t hidden = 0;
  std::uint64_t heads = 0;  // 0: attention's own arithmetic is left out
  std::uint64_t vocab = 0;  // 0: embeddings are left out
  std::uint64_t seq = 1024;
  // Where the model is not 12 hidden^2 per block; 0: it is.
  double block_params = 0;
  double active_block_params = 0;  // of these, used by a token (experts)
  double other_params = 0;         // embeddings, head, norms
  double largest_params = 0;       // of the largest operator's weight
};

// kInvalid with every problem in one text: zero or contradictory sizes, more
// parameters than can be counted.
Status check(const ModelShape& shape);

// Of a transformer of which they are not known: 64 wide.
std::uint64_t usual_heads(std::uint64_t hidden);

double block_params(const ModelShape& shape);
double total_params(const ModelShape& shape);
// Of the largest operator's weight: hidden x 4 hidden, or the embedding.
double largest_params(const ModelShape& shape);

// Bytes in the inputs of the blocks, which are kept for backward (one of
// `every` blocks; 2 bytes per element).
double checkpoint_bytes(const ModelShape& shape, double batch,
                        double every = 1);
// The least memory for the largest operator: its weight and its gradient in
// fp16 (MSWM).
double operator_bytes(const ModelShape& shape);
// Activations between two kept inputs, which are computed again (AWM). The
// paper's formula as it is printed; its figure 2a fits 4 samples per device.
double recompute_bytes(const ModelShape& shape, double batch, double every = 1);

// Operations of one block for so many tokens: forward once. Backward takes
// twice as many, recomputation as many again.
double forward_flops(const ModelShape& shape, double tokens);
// Of embeddings and head, forward once.
double head_flops(const ModelShape& shape, double tokens);

}  // namespace zinf::plan
