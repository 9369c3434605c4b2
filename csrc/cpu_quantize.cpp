// quantize and dequantize on the CPU.
#include <ATen/Parallel.h>

#include "cpu_blocks.h"
#include "dispatch.h"

namespace megatron_zpp::cpu {

namespace {

// A block of a matrix, and the block of a message that holds it.
struct BlockPosition {
  int64_t row, column, message, block;
};

// The rows of a message follow one another, and the blocks of a row.
struct MessageOrder {
  int64_t row_blocks, message_rows;
  int block_elements;

  BlockPosition operator()(int64_t index) const {
    const int64_t row = index / row_blocks, in_row = index % row_blocks;
    return {row, in_row * block_elements, row / message_rows, row % message_rows * row_blocks + in_row};
  }
};

template <CodeType C, typename T>
void quantize_blocks(const Quantize& op) {
  const int n = op.format.block;
  const MessageOrder position_of{op.columns / n, op.rows / op.message_count, n};
  const MessageLayout layout = message_layout(op.format, op.rows / op.message_count * op.columns);
  at::parallel_for(0, op.rows * position_of.row_blocks, kGrainElements / n, [&](int64_t begin, int64_t end) {
    alignas(64) float x[kLargestBlock];
    for (int64_t index = begin; index < end; ++index) {
      const BlockPosition position = position_of(index);
      load(static_cast<const T*>(op.input) + position.row * op.row_stride + position.column, x, n);
      const Writer writer{op.messages + position.message * layout.bytes, op.format, layout};
      writer.write<C>(position.block, x);
    }
  });
}

template <CodeType C, typename T>
void dequantize_blocks(const Dequantize& op) {
  const int n = op.format.block;
  const MessageOrder position_of{op.columns / n, op.rows / op.message_count, n};
  const MessageLayout layout = message_layout(op.format, op.rows / op.message_count * op.columns);
  at::parallel_for(0, op.rows * position_of.row_blocks, kGrainElements / n, [&](int64_t begin, int64_t end) {
    alignas(64) float x[kLargestBlock];
    for (int64_t index = begin; index < end; ++index) {
      const BlockPosition position = position_of(index);
      const Reader reader{op.messages + position.message * layout.bytes, op.format, layout};
      reader.read<C>(position.block, [&](int i, float value) { x[i] = value; });
      store(x, static_cast<T*>(op.output) + position.row * op.row_stride + position.column, n);
    }
  });
}

}  // namespace

void run(const Quantize& op) {
  with_code_type(op.format.code_type, [&](auto code_type) {
    with_dtype(op.input_dtype, [&](auto dtype) {
      quantize_blocks<decltype(code_type)::value, typename decltype(dtype)::type>(op);
    });
  });
}

void run(const Dequantize& op) {
  with_code_type(op.format.code_type, [&](auto code_type) {
    with_dtype(op.output_dtype, [&](auto dtype) {
      dequantize_blocks<decltype(code_type)::value, typename decltype(dtype)::type>(op);
    });
  });
}

}  // namespace megatron_zpp::cpu
