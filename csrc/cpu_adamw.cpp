// adamw and adamw_quantize on the CPU.
#include <ATen/Parallel.h>

#include <algorithm>

#include "cpu_blocks.h"
#include "dispatch.h"

namespace megatron_zpp::cpu {

namespace {

AdamwScalars scalars_of(const Adamw& op) { return adamw_scalars(op.constants, *op.divisor, op.bias_corrections); }

// Steps the elements [start, start + n), all with weight decay or all without.
template <typename G>
void step_run(const Adamw& op, const AdamwScalars& scalars, int64_t start, int64_t n, bool decays) {
  float* __restrict__ master = op.master + start;
  const G* __restrict__ gradient = static_cast<const G*>(op.gradient) + start;
  float* __restrict__ average = op.exp_avg + start;
  float* __restrict__ average_square = op.exp_avg_sq + start;
  const AdamwConstants constants = op.constants;
  for (int64_t i = 0; i < n; ++i) {
    const AdamwState before{master[i], average[i], average_square[i]};
    const AdamwState after = adamw_step(before, to_float(gradient[i]), decays, constants, scalars);
    master[i] = after.weight;
    average[i] = after.average;
    average_square[i] = after.average_square;
  }
}

void step(const Adamw& op, const AdamwScalars& scalars, int64_t start, int64_t n) {
  const int64_t decaying = std::clamp<int64_t>(op.decayed - start, 0, n);
  with_type(op.gradient_type, [&](auto type) {
    using G = typename decltype(type)::type;
    step_run<G>(op, scalars, start, decaying, true);
    step_run<G>(op, scalars, start + decaying, n - decaying, false);
  });
}

template <typename T>
void publish(const float* master, T* published, int64_t n) {
  for (int64_t i = 0; i < n; ++i) published[i] = narrow<T>(master[i]);
}

}  // namespace

void run(const AdamwPublish& op) {
  if (*op.step.found_inf != 0) return;
  const AdamwScalars scalars = scalars_of(op.step);
  at::parallel_for(0, op.step.elements, kGrainElements, [&](int64_t begin, int64_t end) {
    for (int64_t start = begin; start < end; start += kLargestBlock) {
      const int64_t n = std::min<int64_t>(kLargestBlock, end - start);  // still in the cache when it is published
      step(op.step, scalars, start, n);
      if (op.published == nullptr) continue;
      with_type(op.published_type, [&](auto type) {
        publish(op.step.master + start, static_cast<typename decltype(type)::type*>(op.published) + start, n);
      });
    }
  });
}

void run(const AdamwQuantize& op) {
  if (*op.step.found_inf != 0) return;
  const AdamwScalars scalars = scalars_of(op.step);
  const int n = op.format.block;
  const Writer writer{op.message, op.format, message_layout(op.format, op.step.elements)};
  with_codes(op.format.codes, [&](auto codes) {
    at::parallel_for(0, writer.layout.blocks, kGrainElements / n, [&](int64_t begin, int64_t end) {
      alignas(64) float x[kLargestBlock];
      for (int64_t block = begin; block < end; ++block) {
        step(op.step, scalars, block * n, n);
        load(op.step.master + block * n, x, n);
        if (op.format.rotate) rotate(x, n);
        writer.write<decltype(codes)::value>(block, x, nullptr);
      }
    });
  });
}

}  // namespace megatron_zpp::cpu
