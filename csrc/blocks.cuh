// Encoding of whole blocks by groups of lanes, and writing them into messages.
//
// A block is held by 2^log_lanes neighbouring lanes, K runs of RUN elements each: run k of member l begins at element
// (k * lanes + l) * RUN of the block. So neighbours access neighbouring memory, and all reductions are shuffles.
#pragma once

#include "codes.cuh"

namespace megatron_zpp::cuda {

// Which lanes hold which block of which tile.
struct Lanes {
  int log_lanes;  // a block

  __device__ __forceinline__ uint32_t member() const { return lane_index() & ((1u << log_lanes) - 1); }
  __device__ __forceinline__ uint32_t group() const { return lane_index() >> log_lanes; }
  __host__ __device__ __forceinline__ uint32_t groups() const { return kWarp >> log_lanes; }

  // Element of the block at which run k of this lane begins.
  template <int RUN>
  __device__ __forceinline__ uint32_t run(int k) const {
    return k * step<RUN>() + member() * RUN;
  }

  // From one run of a lane to its next.
  template <int RUN>
  __device__ __forceinline__ uint32_t step() const {
    return RUN << log_lanes;
  }
};

// Vectors of eight elements a lane of a block: 1, 4 or 8. Four loads under way are enough for the memory's latency,
// and what is done once a block and lane then costs little an element.
inline int vectors_a_lane(int block) { return block < 128 ? 1 : block <= 1024 ? 4 : 8; }

// Messages to write, all of one format.
struct Writer {
  uint8_t* messages;
  int64_t code_bytes, bytes;  // of one message
  uint32_t padded_block;      // the one behind whose scale there are `padding` bytes of zeros; no block where none are
  uint32_t padding;
  uint32_t scale_bytes;
  int log_block;
  bool fp32_scales;
  bool stochastic;
  PhiloxKeys keys;

  Writer(uint8_t* messages, const Format& format, int64_t elements, Seed seed)
      : messages(messages),
        log_block(log2_of(format.block)),
        fp32_scales(format.scales == Scales::fp32),
        stochastic(seed.given),
        keys(philox_keys(seed.value)) {
    const MessageLayout layout = message_layout(format, elements);
    code_bytes = layout.code_bytes;
    bytes = layout.bytes;
    padding = uint32_t(layout.bytes - layout.used_bytes);
    padded_block = padding > 0 ? index_of(layout.blocks) - 1 : uint32_t(kIndexLimit);
    scale_bytes = megatron_zpp::scale_bytes(format.scales);
  }

  __device__ __forceinline__ uint8_t* message(uint32_t index) const { return messages + index * bytes; }

  template <CodeType C>
  __device__ __forceinline__ uint8_t* codes(uint8_t* message, uint32_t block) const {
    return message + uint64_t(block) * (uint32_t(bits_of_code(C)) << log_block >> 3);
  }

  // For one lane a block: stores the scale, and behind the last one the zeros that fill up the message.
  __device__ __forceinline__ void store_scale(uint8_t* message, uint32_t block, float stored) const {
    uint8_t* scale = message + code_bytes + uint64_t(block) * scale_bytes;
    if (fp32_scales)
      *reinterpret_cast<float*>(scale) = stored;
    else
      *reinterpret_cast<uint16_t*>(scale) = uint16_t(bits_of(stored) >> 16);  // exact: rounded already
    if (block == padded_block) {
#pragma unroll 1
      for (uint32_t at = 0; at < padding; at += 2) *reinterpret_cast<uint16_t*>(scale + scale_bytes + at) = 0;
    }
  }
};

// The key of the lane's signed peak. As signed integers the positive numbers are above all others, as unsigned ones
// the negative numbers are, and both grow with the magnitude; NaN counts as beyond infinity. Hopper takes the larger
// of three integers at once, so this is one operation a number where keys of each would be three.
template <int RUN, int K>
__device__ __forceinline__ uint32_t largest_key(const float (&x)[K][RUN]) {
  int32_t positive = INT32_MIN;
  uint32_t negative = 0;
#pragma unroll
  for (int i = 0; i < K * RUN; i += 2) {
    const uint32_t a = bits_of(x[i / RUN][i % RUN]), b = bits_of(x[i / RUN][i % RUN + 1]);
    positive = max(positive, max(int32_t(a), int32_t(b)));
    negative = max(negative, max(a, b));
  }
  return max(peak_key(float_of(positive)), peak_key(float_of(negative)));
}

// The codes of one run; `index` is that of its first element, for the generator.
template <CodeType C, bool STOCHASTIC, int RUN>
__device__ __forceinline__ void encode_run(const float (&x)[RUN], const BlockScale& scale, const PhiloxKeys& keys,
                                           uint64_t index, uint32_t (&words)[words_of<C>(RUN)]) {
#pragma unroll
  for (int i = 0; i < RUN; i += 8) {
    float eight[8];
    uint32_t part[words_of<C>(8)];
#pragma unroll
    for (int j = 0; j < 8; ++j) eight[j] = x[i + j];
    if constexpr (STOCHASTIC)
      encode_eight<C>(eight, scale.inverse, scale.code_mask, keys, (index + i) >> 3, part);
    else
      encode_eight<C>(eight, scale.inverse, scale.code_mask, part);
#pragma unroll
    for (int w = 0; w < words_of<C>(8); ++w) words[words_of<C>(i) + w] = part[w];
  }
}

// The codes of all runs; `index` is that of the first element of this lane's first run.
template <CodeType C, bool STOCHASTIC, int RUN, int K>
__device__ __forceinline__ void encode_runs(const float (&x)[K][RUN], const BlockScale& scale, const PhiloxKeys& keys,
                                            uint64_t index, uint32_t step, uint32_t (&words)[K][words_of<C>(RUN)]) {
#pragma unroll
  for (int k = 0; k < K; ++k) encode_run<C, STOCHASTIC>(x[k], scale, keys, index + k * step, words[k]);
}

// Encodes x as block `block` of `message`; `index` is that of its first element, for the generator. Calls
// use(k, words, scale) with the codes of each run k. All lanes of a warp must call this; those of no block are not
// `active` and write nothing.
template <CodeType C, int RUN, int K, typename Use>
__device__ __forceinline__ void write_block(const Writer& writer, const Lanes& lanes, uint8_t* message, uint32_t block,
                                            uint64_t index, const float (&x)[K][RUN], bool active, Use&& use) {
  const uint32_t key = largest_of_lanes(largest_key(x), lanes.log_lanes);
  const BlockScale scale = block_scale(key, scale_factor(C), !writer.fp32_scales);
  const uint32_t start = lanes.run<RUN>(0), step = lanes.step<RUN>();
  uint32_t words[K][words_of<C>(RUN)];
  if (writer.stochastic)  // asked once, so that the runs of each rounding are straight code
    encode_runs<C, true>(x, scale, writer.keys, index + start, step, words);
  else
    encode_runs<C, false>(x, scale, writer.keys, 0, 0, words);
  if (active) {
    uint8_t* codes = writer.codes<C>(message, block) + start * bits_of_code(C) / 8;
#pragma unroll
    for (int k = 0; k < K; ++k) store_words(codes + k * step * bits_of_code(C) / 8, words[k]);
  }
#pragma unroll
  for (int k = 0; k < K; ++k) use(k, words[k], scale);
  if (active && lanes.member() == 0) writer.store_scale(message, block, scale.stored);
}

template <CodeType C, int RUN, int K>
__device__ __forceinline__ void write_block(const Writer& writer, const Lanes& lanes, uint8_t* message, uint32_t block,
                                            uint64_t index, const float (&x)[K][RUN], bool active) {
  write_block<C>(writer, lanes, message, block, index, x, active,
                 [](int, const uint32_t (&)[words_of<C>(RUN)], const BlockScale&) {});
}

}  // namespace megatron_zpp::cuda
