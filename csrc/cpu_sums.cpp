// sum_quantize, sum_into, sum_parts and sum_squares on the CPU.
#include <ATen/Parallel.h>

#include <algorithm>

#include "cpu_blocks.h"
#include "dispatch.h"

namespace megatron_zpp::cpu {

namespace {

// Sums `blocks` blocks from `first` on over all messages, in the order of the messages.
template <CodeType C>
void sum_blocks(const uint8_t* messages, int64_t count, const Format& format, const MessageLayout& layout,
                int64_t first, int blocks, float* sum) {
  const int n = format.block;
  for (int64_t p = 0; p < count; ++p) {
    const Reader reader{messages + p * layout.bytes, format, layout};
    for (int b = 0; b < blocks; ++b) {
      float* part = sum + b * n;
      if (p == 0)
        reader.read<C>(first + b, [&](int i, float value) { part[i] = value; });
      else
        reader.read<C>(first + b, [&](int i, float value) { part[i] += value; });
    }
  }
}

// Encodes a block x (n,) of the sum as block `index` of all outputs.
template <CodeType C>
void write_block(const SumQuantize& op, const MessageLayout& layout, int64_t index, const float* x) {
  const Writer writer{op.output + index / layout.blocks * layout.bytes, op.output_format, layout};
  writer.write<C>(index % layout.blocks, x);
}

template <CodeType In, CodeType Out>
void sum_quantize_blocks(const SumQuantize& op) {
  const int in = op.format.block, out = op.output_format.block;
  const int chunk = std::max(in, out);  // whole blocks of both
  const MessageLayout layout = message_layout(op.format, op.elements);
  const MessageLayout output_layout = message_layout(op.output_format, op.elements / op.output_count);
  at::parallel_for(0, op.elements / chunk, kGrainElements / chunk, [&](int64_t begin, int64_t end) {
    alignas(64) float sum[kLargestBlock];
    for (int64_t index = begin; index < end; ++index) {
      sum_blocks<In>(op.messages, op.message_count, op.format, layout, index * (chunk / in), chunk / in, sum);
      for (int b = 0; b < chunk / out; ++b)
        write_block<Out>(op, output_layout, index * (chunk / out) + b, sum + b * out);
    }
  });
}

// Sets shard (n,) to sum * factor, or adds that to it.
void put(const float* sum, int n, float factor, bool add, float* shard) {
  if (add)
    for (int i = 0; i < n; ++i) shard[i] = shard[i] + sum[i] * factor;
  else
    for (int i = 0; i < n; ++i) shard[i] = sum[i] * factor;
}

template <typename T>
void sum_part_elements(const SumParts& op) {
  const auto part = [&](int64_t p) {
    const bool is_own = op.own != nullptr && p == op.group_rank;
    return is_own ? static_cast<const T*>(op.own) : static_cast<const T*>(op.parts) + p * op.distance;
  };
  at::parallel_for(0, op.elements, kGrainElements, [&](int64_t begin, int64_t end) {
    alignas(64) float sum[kLargestBlock];
    for (int64_t start = begin; start < end; start += kLargestBlock) {
      const int n = int(std::min<int64_t>(kLargestBlock, end - start));
      load(part(0) + start, sum, n);
      for (int64_t p = 1; p < op.part_count; ++p) {
        const T* next = part(p) + start;
        for (int i = 0; i < n; ++i) sum[i] += to_float(next[i]);
      }
      put(sum, n, op.factor, op.add, op.shard + start);
    }
  });
}

// The sum of squares of a block, in the order of a warp: eight elements per lane, then across lanes, lane i and
// lane i + 16, then i and i + 8, and so on.
template <typename T>
float sum_of_squares(const T* block) {
  constexpr int kLanes = kSquaresBlock / 8;
  float sums[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < 8; ++i) {
      const float x = to_float(block[8 * lane + i]);
      sums[lane] = i == 0 ? x * x : sums[lane] + x * x;
    }
  }
  for (int distance = kLanes / 2; distance > 0; distance /= 2)
    for (int lane = 0; lane < distance; ++lane) sums[lane] += sums[lane + distance];
  return sums[0];
}

}  // namespace

void run(const SumQuantize& op) {
  with_code_type(op.format.code_type, [&](auto in) {
    with_code_type(op.output_format.code_type,
               [&](auto out) { sum_quantize_blocks<decltype(in)::value, decltype(out)::value>(op); });
  });
}

void run(const SumInto& op) {
  const int n = op.format.block;
  const MessageLayout layout = message_layout(op.format, op.elements);
  with_code_type(op.format.code_type, [&](auto code_type) {
    at::parallel_for(0, layout.blocks, kGrainElements / n, [&](int64_t begin, int64_t end) {
      alignas(64) float sum[kLargestBlock];
      for (int64_t block = begin; block < end; ++block) {
        sum_blocks<decltype(code_type)::value>(op.messages, op.message_count, op.format, layout, block, 1, sum);
        put(sum, n, op.factor, op.add, op.shard + block * n);
      }
    });
  });
}

void run(const SumParts& op) {
  with_dtype(op.part_dtype, [&](auto dtype) { sum_part_elements<typename decltype(dtype)::type>(op); });
  if (op.squares) run(SumSquares{op.shard, DType::fp32, op.elements, op.squares});
}

void run(const SumSquares& op) {
  with_dtype(op.input_dtype, [&](auto dtype) {
    const auto* input = static_cast<const typename decltype(dtype)::type*>(op.input);
    const int64_t blocks = op.elements / kSquaresBlock;
    at::parallel_for(0, blocks, kGrainElements / kSquaresBlock, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) op.sums[k] = sum_of_squares(input + k * kSquaresBlock);
    });
  });
}

}  // namespace megatron_zpp::cpu
