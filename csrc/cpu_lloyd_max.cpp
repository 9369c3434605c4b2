// quantize_difference, add_difference, quantize_rotated and sum_rotated on the CPU.
#include <ATen/Parallel.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "cpu_blocks.h"
#include "dispatch.h"
#include "lloyd_max.h"

namespace megatron_zpp::cpu {

namespace {

// Calls run(std::integral_constant<int, bits>()).
template <typename Run>
void with_bits(int bits, Run&& run) {
  switch (bits) {
    case 2: return run(std::integral_constant<int, 2>());
    case 4: return run(std::integral_constant<int, 4>());
  }
  throw std::invalid_argument("megatron_zpp: no codes of " + std::to_string(bits) + " bits");
}

// ---- statistics of a block ----

// The sum of a[i] * b[i] in the order of `ordered_sum` (megatron_zpp/ops/lloyd_max.py): eight neighbours in turn, then
// the results in halves onto each other.
float sum_of_products(const float* a, const float* b, int n) {
  float sums[kLargestBlock / 8];
  for (int run = 0; run < n / 8; ++run) {
    float sum = a[8 * run] * b[8 * run];
    for (int i = 1; i < 8; ++i) sum += a[8 * run + i] * b[8 * run + i];
    sums[run] = sum;
  }
  for (int half = n / 16; half > 0; half /= 2)
    for (int run = 0; run < half; ++run) sums[run] += sums[run + half];
  return sums[0];
}

// A block over a power of two: its largest magnitude is then in [1, 2).
struct Power {
  float power;
  bool finite, usable;  // neither NaN nor Inf; besides, not below 2^-126

  static Power of(const float* x, int n) {
    uint32_t key = 0;
    for (int i = 0; i < n; ++i) key = std::max(key, bits_of(x[i]) & ~kSignBit);
    const bool finite = key < kInfinityBits, usable = finite && key >= 0x00800000u;
    return {usable ? float_of(key & kInfinityBits) : 1.f, finite, usable};
  }

  void divide(const float* x, float* z, int n) const {
    const float inverse = 1.f / power;  // exact
    for (int i = 0; i < n; ++i) z[i] = x[i] * inverse;
  }

  // The bits of a scale in bf16: 0 for a block of zeros or one below the normal numbers, NaN for one that is not
  // finite or overflows.
  uint32_t stored(float scale) const {
    if (!finite) return 0x7FC0u;
    if (!usable) return 0u;
    const uint32_t bits = narrow<Bf16>(scale).bits;
    if (bits == 0x7F80u) return 0x7FC0u;
    return float_of(bits << 16) >= 0x1p-126f ? bits : 0u;
  }
};

// ---- codes ----

// The codes of x in multiples of `unit`, from the lowest level up.
template <int BITS>
void encode_levels(const float* x, int n, float unit, uint8_t* codes) {
  constexpr int kHalf = 1 << (BITS - 1);
  float boundary[kHalf - 1];
  for (int b = 0; b < kHalf - 1; ++b) boundary[b] = unit * lloyd_max_boundary(BITS, b);
  for (int i = 0; i < n; ++i) {
    const float size = fabsf(x[i]);
    uint32_t magnitude = 0;
    for (int b = 0; b < kHalf - 1; ++b) magnitude += size >= boundary[b] ? 1 : 0;
    codes[i] = uint8_t(x[i] < 0.f ? kHalf - 1 - magnitude : kHalf + magnitude);
  }
}

template <int BITS>
struct Levels {
  float of_code[1 << BITS];

  Levels() {
    constexpr int kHalf = 1 << (BITS - 1);
    for (int i = 0; i < kHalf; ++i) {
      of_code[kHalf + i] = lloyd_max_level(BITS, i);
      of_code[kHalf - 1 - i] = -lloyd_max_level(BITS, i);
    }
  }

  // Calls use(i, level) with the level of every code.
  template <typename Use>
  void read(const uint8_t* codes, int n, Use&& use) const {
    for (int i = 0; i < n; ++i) use(i, of_code[codes[i]]);
  }
};

// Packs codes of BITS bits, the first element in the lowest bits of a byte.
template <int BITS>
void pack(const uint8_t* codes, int n, uint8_t* bytes) {
  constexpr int kPerByte = 8 / BITS;
  for (int k = 0; k < n / kPerByte; ++k) {
    uint32_t byte = 0;
    for (int i = 0; i < kPerByte; ++i) byte |= uint32_t(codes[k * kPerByte + i]) << BITS * i;
    bytes[k] = uint8_t(byte);
  }
}

template <int BITS>
void unpack(const uint8_t* bytes, int n, uint8_t* codes) {
  constexpr int kPerByte = 8 / BITS;
  for (int k = 0; k < n / kPerByte; ++k)
    for (int i = 0; i < kPerByte; ++i) codes[k * kPerByte + i] = bytes[k] >> BITS * i & ((1u << BITS) - 1);
}

// ---- messages ----

struct LloydMaxMessage {
  uint8_t* bytes;
  int block;
  MessageLayout layout;

  // Writes a block's codes, or zeros where the scale is 0 or NaN, and after the last block the padding.
  template <int BITS>
  void write(int64_t index, uint8_t* codes, uint32_t stored) const {
    if (!(float_of(stored << 16) > 0.f)) std::memset(codes, 0, size_t(block));
    pack<BITS>(codes, block, bytes + index * block * BITS / 8);
    const uint16_t bits = uint16_t(stored);
    std::memcpy(bytes + layout.code_bytes + 2 * index, &bits, sizeof bits);
    if (index == layout.blocks - 1) std::memset(bytes + layout.used_bytes, 0, layout.bytes - layout.used_bytes);
  }

  // Reads a block's codes and returns its scale.
  template <int BITS>
  float read(int64_t index, uint8_t* codes) const {
    unpack<BITS>(bytes + index * block * BITS / 8, block, codes);
    return load_scale(bytes + layout.code_bytes, index);
  }
};

// Messages of equal sizes, one after the other.
struct LloydMaxMessages {
  uint8_t* first;
  LloydMaxFormat format;
  MessageLayout layout;

  // `elements` of one message.
  LloydMaxMessages(const uint8_t* first, const LloydMaxFormat& format, int64_t elements)
      : first(const_cast<uint8_t*>(first)),
        format(format),
        layout(message_layout(format, elements)) {}

  LloydMaxMessage operator[](int64_t index) const {
    return {first + index * layout.bytes, format.block, layout};
  }
};

// ---- rotation ----

// Gives x (n,), which begins with element `first` of the unit, a multiple of 32, its signs.
void apply_signs(const Signs& signs, uint64_t first, float* x, int n) {
  Random8 random{};
  for (int start = 0; start < n; start += 32) {
    const uint64_t element = first + start;
    if (start == 0 || element % 128 == 0) random = random_signs(signs, element / 128);
    const uint32_t word = random.word[element % 128 / 32];
    for (int i = 0; i < 32; ++i) x[start + i] = float_of(bits_of(x[start + i]) ^ (word >> i << 31));
  }
}

// Each 256 elements, or the block where it is smaller, times the Hadamard matrix over its root.
void butterflies(float* x, int n) {
  const int width = std::min(n, 256);
  for (int h = 1; h < width; h *= 2) {
    for (int start = 0; start < n; start += 2 * h) {
      for (int i = start; i < start + h; ++i) {
        const float a = x[i], b = x[i + h];
        x[i] = a + b;
        x[i + h] = a - b;
      }
    }
  }
  const float factor = width == 256 ? 0.0625f : width == 128 ? 0.088388346f : width == 64 ? 0.125f : 0.17677669f;
  for (int i = 0; i < n; ++i) x[i] *= factor;
}

// ---- operations ----

template <int BITS>
void quantize_difference_blocks(const QuantizeDifference& op) {
  const int n = op.format.block;
  const int64_t blocks = op.elements / n;
  const LloydMaxMessage message = LloydMaxMessages(op.message, op.format, op.elements)[0];
  const bool skip = op.skip != nullptr && *op.skip != 0.f;
  const Levels<BITS> levels;
  at::parallel_for(0, blocks, kGrainElements / n, [&](int64_t begin, int64_t end) {
    alignas(64) float d[kLargestBlock], z[kLargestBlock];
    alignas(64) uint8_t codes[kLargestBlock];
    for (int64_t block = begin; block < end; ++block) {
      const float *weights = op.weights + block * n, *reference = op.reference + block * n;
      for (int i = 0; i < n; ++i) d[i] = weights[i] - reference[i];
      const Power power = Power::of(d, n);
      power.divide(d, z, n);
      const float mean = sum_of_products(z, z, n) * (1.f / n);
      const uint32_t stored = skip ? 0u : power.stored(power.power * sqrtf(mean));
      const float scale = float_of(stored << 16);
      encode_levels<BITS>(d, n, scale, codes);
      message.write<BITS>(block, codes, stored);
      if (op.squares == nullptr) continue;
      levels.read(codes, n, [&](int i, float level) { z[i] = d[i] - level * scale; });
      op.squares[block] = skip ? 0.f : sum_of_products(d, d, n);
      op.squares[blocks + block] = skip ? 0.f : sum_of_products(z, z, n);
    }
  });
}

template <int BITS>
void add_difference_blocks(const AddDifference& op) {
  const int n = op.format.block;
  const LloydMaxMessages messages(op.messages, op.format, op.elements);
  const int64_t blocks = messages.layout.blocks;
  const Levels<BITS> levels;
  at::parallel_for(0, op.message_count * blocks, kGrainElements / n, [&](int64_t begin, int64_t end) {
    alignas(64) uint8_t codes[kLargestBlock];
    for (int64_t index = begin; index < end; ++index) {
      const float scale = messages[index / blocks].read<BITS>(index % blocks, codes);
      if (scale == 0.f) continue;  // the reference keeps its bits
      float* reference = op.reference + index * n;
      levels.read(codes, n, [&](int i, float level) { reference[i] += level * scale; });
    }
  });
}

template <int BITS, typename T>
void quantize_rotated_blocks(const QuantizeRotated& op) {
  const int n = op.format.block;
  const LloydMaxMessages messages(op.messages, op.format, op.elements / op.message_count);
  const int64_t blocks = messages.layout.blocks;
  const Levels<BITS> levels;
  at::parallel_for(0, op.message_count * blocks, kGrainElements / n, [&](int64_t begin, int64_t end) {
    alignas(64) float x[kLargestBlock], z[kLargestBlock], chosen[kLargestBlock];
    alignas(64) uint8_t codes[kLargestBlock];
    for (int64_t index = begin; index < end; ++index) {
      load(static_cast<const T*>(op.input) + index * n, x, n);
      Bf16* lost = op.feedback.lost;
      if (lost != nullptr) {
        lost += index / blocks * op.feedback.distance + index % blocks * n;
        for (int i = 0; i < n; ++i) x[i] += to_float(lost[i]) * *op.feedback.divisor;
      }
      apply_signs(op.signs, op.signs.first + index * n, x, n);
      butterflies(x, n);
      const Power power = Power::of(x, n);
      power.divide(x, z, n);
      const float squares = sum_of_products(z, z, n);
      encode_levels<BITS>(z, n, sqrtf(squares * (1.f / n)), codes);
      levels.read(codes, n, [&](int i, float level) { chosen[i] = level; });
      const float ratio = squares / sum_of_products(z, chosen, n);
      const uint32_t stored = power.stored(power.power * ratio);
      messages[index / blocks].write<BITS>(index % blocks, codes, stored);
      if (lost == nullptr) continue;
      const float scale = float_of(stored << 16), inverse = 1.f / *op.feedback.divisor;
      levels.read(codes, n, [&](int i, float level) { x[i] -= level * scale; });
      butterflies(x, n);
      apply_signs(op.signs, op.signs.first + index * n, x, n);
      for (int i = 0; i < n; ++i) lost[i] = narrow<Bf16>(x[i] * inverse);
    }
  });
}

template <int BITS>
void sum_rotated_blocks(const SumRotated& op) {
  const int n = op.format.block;
  const LloydMaxMessages messages(op.messages, op.format, op.elements);
  const Levels<BITS> levels;
  at::parallel_for(0, messages.layout.blocks, kGrainElements / n, [&](int64_t begin, int64_t end) {
    alignas(64) float sum[kLargestBlock];
    alignas(64) uint8_t codes[kLargestBlock];
    for (int64_t block = begin; block < end; ++block) {
      for (int64_t m = 0; m < op.message_count; ++m) {
        const float scale = messages[m].read<BITS>(block, codes);
        if (m == 0)
          levels.read(codes, n, [&](int i, float level) { sum[i] = level * scale; });
        else
          levels.read(codes, n, [&](int i, float level) { sum[i] += level * scale; });
      }
      butterflies(sum, n);
      apply_signs(op.signs, op.signs.first + block * n, sum, n);
      float* shard = op.shard + block * n;
      if (op.add)
        for (int i = 0; i < n; ++i) shard[i] += sum[i];
      else
        for (int i = 0; i < n; ++i) shard[i] = sum[i];
    }
  });
}

}  // namespace

void run(const QuantizeDifference& op) {
  with_bits(op.format.bits, [&](auto bits) { quantize_difference_blocks<decltype(bits)::value>(op); });
}

void run(const AddDifference& op) {
  with_bits(op.format.bits, [&](auto bits) { add_difference_blocks<decltype(bits)::value>(op); });
}

void run(const QuantizeRotated& op) {
  with_bits(op.format.bits, [&](auto bits) {
    with_dtype(op.input_dtype, [&](auto dtype) {
      quantize_rotated_blocks<decltype(bits)::value, typename decltype(dtype)::type>(op);
    });
  });
}

void run(const SumRotated& op) {
  with_bits(op.format.bits, [&](auto bits) { sum_rotated_blocks<decltype(bits)::value>(op); });
}

}  // namespace megatron_zpp::cpu
