// Sums messages, in their order.
#pragma once

#include "codes.cuh"

namespace megatron_zpp::cuda {

// The messages to sum.
struct Addends {
  Reader reader;
  uint32_t count;
  float fused_below;  // scales below this give the same sum with an fma as with a product and an addition

  // The product with a bf16 scale is exact, so the sums are equal unless it overflows: then only the fma, which does
  // not round the product, can be finite.
  Addends(const uint8_t* messages, const Format& format, int64_t elements, int64_t count)
      : reader(messages, format, elements), count(index_of(count)) {
    index_of(elements / 16);  // checks that runs and 16-byte quads of codes can be counted in 32 bits
    fused_below = 0x1.fffffep127f / float(1 << (bits_of_code(format.code_type) - 1));
  }
};

enum class Accumulate { set, fused, separate };

// Sets sum to fl(code * scale), or to fl(sum + fl(code * scale)) with an fma or with two instructions.
template <CodeType C, Accumulate MODE, int RUN>
__device__ __forceinline__ void add_run(const uint32_t (&words)[words_of<C>(RUN)], float scale, float (&sum)[RUN]) {
#pragma unroll
  for (int i = 0; i < RUN; i += 8) {  // eight at a time need few registers
    uint32_t part[words_of<C>(8)];
    float codes[8];
#pragma unroll
    for (int w = 0; w < words_of<C>(8); ++w) part[w] = words[words_of<C>(i) + w];
    decode_codes<C>(part, codes);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if constexpr (MODE == Accumulate::set) sum[i + j] = codes[j] * scale;
      if constexpr (MODE == Accumulate::fused) sum[i + j] = fmaf(codes[j], scale, sum[i + j]);
      if constexpr (MODE == Accumulate::separate) sum[i + j] += codes[j] * scale;
    }
  }
}

// A stage of the prefetch pipeline: what a warp loads of one message for one tile: RUN elements per lane and their
// scale. The warp's 16-byte quad q is at swizzled(q).
template <CodeType C, int RUN>
struct alignas(128) Stage {
  static constexpr int kQuads = words_of<C>(RUN) / 4;  // per lane
  uint4 quads[kWarp * kQuads];
  uint32_t scale_words[kWarp];

  __device__ __forceinline__ uint4& quad_at(uint32_t byte) {
    return *reinterpret_cast<uint4*>(reinterpret_cast<uint8_t*>(quads) + byte);
  }
};

// Sums tiles of messages, in the order of the messages. A lane has RUN neighbouring elements of a tile, in one
// block. The data of the next STAGES additions, also those of later tiles, are being copied to shared memory, because
// registers cannot hold as many bytes as hide the memory's latency. Lanes past the end load the last elements again.
template <CodeType C, int RUN, int STAGES>
class TileSums {
 public:
  using Stages = Stage<C, RUN>[STAGES];

  // `stages` belongs to this warp. Its tiles are `first`, `first` + `step` and so on, up to `runs` runs of elements;
  // there must be at least one tile.
  __device__ __forceinline__ TileSums(const Addends& addends, Stages& stages, uint32_t first, uint32_t step,
                                      uint32_t runs)
      : addends_(addends),
        oldest_(stages),
        end_(stages + STAGES),
        next_tile_(first),
        step_(step),
        runs_(runs),
        own_(16 * swizzled(lane_index() * kQuads)),
        row_(16 * swizzled(lane_index())) {
    point_at_tile();
#pragma unroll
    for (int s = 0; s < STAGES; ++s) load_next(stages[s]);
  }

  // Sums `tile`, which must be the warp's next one.
  __device__ __forceinline__ void next(uint32_t tile, float (&sum)[RUN]) {
    const uint32_t selector = addends_.reader.template scale_selector_of_run<RUN>(run_of_lane(tile));
    add_message<true>(selector, sum);
    for (uint32_t message = 1; message < addends_.count; ++message) add_message<false>(selector, sum);
  }

 private:
  using OneStage = Stage<C, RUN>;
  static constexpr int kQuads = OneStage::kQuads;

  // The number of this lane's run, counted from the beginning of a message.
  __device__ __forceinline__ uint32_t run_of_lane(uint32_t tile) const {
    return min(tile * kWarp + lane_index(), runs_ - 1);
  }

  __device__ __forceinline__ void point_at_tile() {
    const Reader& reader = addends_.reader;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const uint32_t quad = min((next_tile_ * kQuads + q) * kWarp + lane_index(), runs_ * kQuads - 1);
      quads_[q] = reader.messages + uint64_t(quad) * 16;
    }
    scale_word_ = reader.scale_word_of_run<RUN>(reader.messages, run_of_lane(next_tile_));
    left_ = addends_.count;
  }

  // Submits one group of copies; the group is empty after the last tile.
  __device__ __forceinline__ void load_next(OneStage& stage) {
    if (next_tile_ * kWarp < runs_) {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        copy_bytes<16>(&stage.quad_at(row_byte(q)), quads_[q]);
        quads_[q] += addends_.reader.bytes;
      }
      copy_bytes<4>(&stage.scale_words[lane_index()], scale_word_);
      scale_word_ += addends_.reader.bytes;
      if (--left_ == 0) {
        next_tile_ += step_;
        if (next_tile_ * kWarp < runs_) point_at_tile();
      }
    }
    end_group_of_copies();
  }

  template <bool FIRST>
  __device__ __forceinline__ void add_message(uint32_t selector, float (&sum)[RUN]) {
    OneStage& stage = *oldest_;
    wait_for_all_groups_but<STAGES - 1>();
    if constexpr (kQuads > 1) __syncwarp();  // all lanes' copies have arrived
    uint32_t words[words_of<C>(RUN)];
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const uint4 four = stage.quad_at(own_byte(q));
      words[4 * q] = four.x;
      words[4 * q + 1] = four.y;
      words[4 * q + 2] = four.z;
      words[4 * q + 3] = four.w;
    }
    const float scale = scale_of_word(stage.scale_words[lane_index()], selector);
    if constexpr (FIRST)
      add_run<C, Accumulate::set>(words, scale, sum);
    else if (fabsf(scale) < addends_.fused_below)
      add_run<C, Accumulate::fused>(words, scale, sum);
    else
      add_run<C, Accumulate::separate>(words, scale, sum);
    if constexpr (kQuads > 1) __syncwarp();  // all lanes have read the stage
    load_next(stage);
    if (++oldest_ == end_) oldest_ -= STAGES;
  }

  // 16 * swizzled(lane_index() * kQuads + q), and 16 * swizzled(q * kWarp + lane_index()).
  __device__ __forceinline__ uint32_t own_byte(int q) const { return own_ ^ 16 * q; }
  __device__ __forceinline__ uint32_t row_byte(int q) const { return (row_ ^ 64 * (q % 2)) + 16 * kWarp * q; }

  const Addends& addends_;
  OneStage *oldest_, *end_;           // oldest_ is added next
  uint32_t next_tile_, step_, runs_;  // next_tile_ is loaded next
  uint32_t left_;                     // messages of next_tile_ that are not loaded yet
  uint32_t own_, row_;
  const uint8_t* quads_[kQuads];
  const uint8_t* scale_word_;
};

}  // namespace megatron_zpp::cuda
