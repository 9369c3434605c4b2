// sum_quantize, sum_into, sum_parts and sum_squares on the CPU.
#include <ATen/Parallel.h>

#include <algorithm>

#include "cpu_blocks.h"
#include "dispatch.h"

namespace megatron_zpp::cpu {

namespace {

// Sums a block over all messages, in the order of the messages.
template <CodeType C>
void sum_block(const uint8_t* messages, int64_t count, const Format& format, const MessageLayout& layout,
               int64_t block, float* sum) {
  for (int64_t p = 0; p < count; ++p) {
    const Reader reader{messages + p * layout.bytes, format, layout};
    if (p == 0)
      reader.read<C>(block, [&](int i, float value) { sum[i] = value; });
    else
      reader.read<C>(block, [&](int i, float value) { sum[i] += value; });
  }
}

template <CodeType C>
void sum_quantize_blocks(const SumQuantize& op) {
  const MessageLayout layout = message_layout(op.format, op.elements);
  const MessageLayout output = message_layout(op.format, op.elements / op.output_count);
  at::parallel_for(0, layout.blocks, kGrainElements / op.format.block, [&](int64_t begin, int64_t end) {
    alignas(64) float sum[kLargestBlock];
    for (int64_t block = begin; block < end; ++block) {
      sum_block<C>(op.messages, op.message_count, op.format, layout, block, sum);
      const Writer writer{op.output + block / output.blocks * output.bytes, op.format, output};
      writer.write<C>(block % output.blocks, sum);
    }
  });
}

// Sets shard (n,) to sum, or adds that to it.
void put(const float* sum, int n, bool add, float* shard) {
  if (add)
    for (int i = 0; i < n; ++i) shard[i] = shard[i] + sum[i];
  else
    for (int i = 0; i < n; ++i) shard[i] = sum[i];
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
      put(sum, n, op.add, op.shard + start);
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
  with_code_type(op.format.code_type, [&](auto code_type) { sum_quantize_blocks<decltype(code_type)::value>(op); });
}

void run(const SumInto& op) {
  const int n = op.format.block;
  const MessageLayout layout = message_layout(op.format, op.elements);
  with_code_type(op.format.code_type, [&](auto code_type) {
    at::parallel_for(0, layout.blocks, kGrainElements / n, [&](int64_t begin, int64_t end) {
      alignas(64) float sum[kLargestBlock];
      for (int64_t block = begin; block < end; ++block) {
        sum_block<decltype(code_type)::value>(op.messages, op.message_count, op.format, layout, block, sum);
        put(sum, n, op.add, op.shard + block * n);
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
