// adamw and adamw_quantize on the CPU.
#include <ATen/Parallel.h>

#include <algorithm>

#include "cpu_blocks.h"
#include "dispatch.h"

namespace megatron_zpp::cpu {

namespace {

AdamwFactors factors_of(const AdamwStep& op) {
  return adamw_factors(op.scalars.constants, *op.scalars.divisor, op.scalars.bias_corrections);
}

// Steps the elements [start, start + n), all of them with weight decay or none.
template <typename G>
void step_run(const AdamwStep& op, const AdamwFactors& factors, int64_t start, int64_t n, bool decays) {
  float* __restrict__ master = op.master + start;
  const G* __restrict__ gradient = static_cast<const G*>(op.gradient) + start;
  float* __restrict__ average = op.exp_avg + start;
  float* __restrict__ average_square = op.exp_avg_sq + start;
  const AdamwConstants constants = op.scalars.constants;
  for (int64_t i = 0; i < n; ++i) {
    const AdamwState before{master[i], average[i], average_square[i]};
    const AdamwState after = adamw_step(before, to_float(gradient[i]), decays, constants, factors);
    master[i] = after.weight;
    average[i] = after.average;
    average_square[i] = after.average_square;
  }
}

void step(const AdamwStep& op, const AdamwFactors& factors, int64_t start, int64_t n) {
  const int64_t decaying = std::clamp<int64_t>(op.decayed - start, 0, n);
  with_dtype(op.gradient_dtype, [&](auto dtype) {
    using G = typename decltype(dtype)::type;
    step_run<G>(op, factors, start, decaying, true);
    step_run<G>(op, factors, start + decaying, n - decaying, false);
  });
}

template <typename T>
void write_gather_source(const float* master, T* gather_source, int64_t n) {
  for (int64_t i = 0; i < n; ++i) gather_source[i] = narrow<T>(master[i]);
}

}  // namespace

void run(const Adamw& op) {
  if (*op.step.scalars.found_inf != 0) return;
  const AdamwFactors factors = factors_of(op.step);
  at::parallel_for(0, op.step.elements, kGrainElements, [&](int64_t begin, int64_t end) {
    for (int64_t start = begin; start < end; start += kLargestBlock) {
      const int64_t n = std::min<int64_t>(kLargestBlock, end - start);  // new weights are in the cache when narrowed
      step(op.step, factors, start, n);
      if (op.gather_source == nullptr) continue;
      with_dtype(op.gather_source_dtype, [&](auto dtype) {
        auto* gather_source = static_cast<typename decltype(dtype)::type*>(op.gather_source);
        write_gather_source(op.step.master + start, gather_source + start, n);
      });
    }
  });
}

void run(const AdamwQuantize& op) {
  if (*op.step.scalars.found_inf != 0) return;
  const AdamwFactors factors = factors_of(op.step);
  const int n = op.format.block;
  const Writer writer{op.message, op.format, message_layout(op.format, op.step.elements)};
  with_code_type(op.format.code_type, [&](auto code_type) {
    at::parallel_for(0, writer.layout.blocks, kGrainElements / n, [&](int64_t begin, int64_t end) {
      alignas(64) float x[kLargestBlock];
      for (int64_t block = begin; block < end; ++block) {
        step(op.step, factors, block * n, n);
        load(op.step.master + block * n, x, n);
        writer.write<decltype(code_type)::value>(block, x);
      }
    });
  });
}

}  // namespace megatron_zpp::cpu
