// The checks of the operators' arguments.
//
// Every check raises ValueError that names the operator, the argument, what is valid and what was passed.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <string_view>
#include <utility>

#include "lloyd_max.h"
#include "message.h"
#include "state_codes.h"

namespace megatron_zpp::checks {

using Named = std::pair<const char*, const at::Tensor*>;  // null: an optional tensor that was not passed

// A format of block codes.
Format format(const char* op, std::string_view code_type, int64_t block);

// A matrix (R, n) of floats: n is whole blocks, rows are contiguous and do not overlap.
void rows(const char* op, const char* name, const at::Tensor& tensor, const Format& format);

// Messages (G, message_bytes(R / G * n)) of rows (R, n).
void messages_of_rows(const char* op, const at::Tensor& messages, const at::Tensor& rows, const Format& format);

// Returns m of messages (P, message_bytes(m)).
int64_t numel_of_messages(const char* op, const at::Tensor& messages, const Format& format);

// The output (G, message_bytes(m / G)) of sum_quantize.
void summed_output(const char* op, const at::Tensor& output, int64_t numel, const Format& format);

// The parts (P, m) of sum_parts, whose rows are contiguous and do not overlap, and the part (m,) of rank `group_rank`
// that is stored elsewhere (null: none).
void parts(const char* op, const at::Tensor& parts, const at::Tensor* own, int64_t group_rank);

// The sums (m / kSquaresBlock,) of the squares of a contiguous input (m,) of floats.
void sums_of_squares(const char* op, const char* name, const at::Tensor& sums, const char* input_name,
                     const at::Tensor& input);

// A contiguous tensor of one of the dtypes and exactly this shape.
void contiguous(const char* op, const char* name, const at::Tensor& tensor,
                std::initializer_list<at::ScalarType> dtypes, at::IntArrayRef shape);

// The message (message_bytes(m),) of weights (m,).
void message_of_weights(const char* op, const at::Tensor& message, const at::Tensor& master, const Format& format);

// AdamW's fp32 states, master first, all (m,), and the number of elements with weight decay.
void adamw_states(const char* op, std::initializer_list<Named> states, int64_t decayed);

// AdamW's scalars in the order of `packed` of megatron_zpp/ops/adamw.py.
void adamw_scalars(const char* op, const at::Tensor& master, at::TensorList device_scalars,
                   at::ArrayRef<double> host_scalars);

// The weights (m,) of whole state blocks that adamw_compact changes: fp32, or the bytes beside a bf16 gather source.
void compact_weights(const char* op, const at::Tensor& master, const at::Tensor* gather_source, int64_t decayed);

// A moment (m,): fp32 or bf16, or fp16 or bytes with scales (m / kStateBlock,).
void state(const char* op, const char* name, const at::Tensor& values, const char* scales_name,
           const at::Tensor* scales, const at::Tensor& master);

Rounding rounding(const char* op, int64_t seed, int64_t unit, int64_t first, const float* step);

// A format of Lloyd-Max codes.
LloydMaxFormat lloyd_max(const char* op, int64_t bits, int64_t block);

// A contiguous tensor (m,) of whole blocks, which kernels load 16 bytes at a time.
void flat(const char* op, const char* name, const at::Tensor& tensor, std::initializer_list<at::ScalarType> dtypes,
          int64_t block);

// Messages (G, message_bytes(numel / G)) of Lloyd-Max codes. Returns numel / G.
int64_t lloyd_max_messages(const char* op, const char* name, const at::Tensor& messages, int64_t numel,
                           const LloydMaxFormat& format);

// What codes lost of `groups` messages of `numel` elements each, (groups, numel) bf16 in aligned rows, and its divisor.
void feedback(const char* op, const at::Tensor& lost, const at::Tensor* divisor, int64_t groups, int64_t numel);

Signs signs(const char* op, int64_t seed, int64_t unit, int64_t iteration, int64_t first);

// All tensors are on the device of the first one, which must not be null.
void same_device(const char* op, std::initializer_list<Named> tensors);

}  // namespace megatron_zpp::checks
