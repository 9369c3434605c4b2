// quantize and dequantize on the CPU.
#include <ATen/Parallel.h>

#include "cpu_blocks.h"
#include "dispatch.h"

namespace megatron_zpp::cpu {

namespace {

// Which block of which message holds a block of a matrix whose rows go round the messages.
struct Place {
  int64_t row, column, message, block;
};

struct Arrangement {
  int64_t row_blocks, message_count;
  int block_elements;

  Place operator()(int64_t index) const {
    const int64_t row = index / row_blocks, in_row = index % row_blocks;
    return {row, in_row * block_elements, row % message_count, row / message_count * row_blocks + in_row};
  }
};

template <Codes C, typename T>
void quantize_blocks(const Quantize& op) {
  const int n = op.format.block;
  const Arrangement place_of{op.columns / n, op.message_count, n};
  const MessageLayout layout = message_layout(op.format, op.rows / op.message_count * op.columns);
  const PhiloxKeys keys = philox_keys(op.seed.value);
  at::parallel_for(0, op.rows * place_of.row_blocks, kGrainElements / n, [&](int64_t begin, int64_t end) {
    alignas(64) float x[kLargestBlock];
    alignas(64) uint16_t random[kLargestBlock];
    for (int64_t index = begin; index < end; ++index) {
      const Place place = place_of(index);
      load(static_cast<const T*>(op.input) + place.row * op.row_stride + place.column, x, n);
      if (op.format.rotate) rotate(x, n);
      if (op.seed.given) fill_random(keys, place.row * op.columns + place.column, n, random);
      const Writer writer{op.messages + place.message * layout.bytes, op.format, layout};
      writer.write<C>(place.block, x, op.seed.given ? random : nullptr);
    }
  });
}

template <Codes C, typename T>
void dequantize_blocks(const Dequantize& op) {
  const int n = op.format.block;
  const Arrangement place_of{op.columns / n, op.message_count, n};
  const MessageLayout layout = message_layout(op.format, op.rows / op.message_count * op.columns);
  at::parallel_for(0, op.rows * place_of.row_blocks, kGrainElements / n, [&](int64_t begin, int64_t end) {
    alignas(64) float x[kLargestBlock];
    for (int64_t index = begin; index < end; ++index) {
      const Place place = place_of(index);
      const Reader reader{op.messages + place.message * layout.bytes, op.format, layout};
      reader.read<C>(place.block, [&](int i, float value) { x[i] = value; });
      if (op.format.rotate) rotate(x, n);
      store(x, static_cast<T*>(op.output) + place.row * op.row_stride + place.column, n);
    }
  });
}

}  // namespace

void run(const Quantize& op) {
  with_codes(op.format.codes, [&](auto codes) {
    with_type(op.input_type, [&](auto type) {
      quantize_blocks<decltype(codes)::value, typename decltype(type)::type>(op);
    });
  });
}

void run(const Dequantize& op) {
  with_codes(op.format.codes, [&](auto codes) {
    with_type(op.output_type, [&](auto type) {
      dequantize_blocks<decltype(codes)::value, typename decltype(type)::type>(op);
    });
  });
}

}  // namespace megatron_zpp::cpu
