// What each operator accepts. megatron_zpp/ops/checks.py says the same words.
//
// Every check raises ValueError that names the operator, the argument, what is right and what it got.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <string_view>
#include <utility>

#include "message.h"

namespace megatron_zpp::checks {

using Named = std::pair<const char*, const at::Tensor*>;  // null: not given

// `prefix` is that of the arguments' names.
Format format(const char* op, std::string_view codes, int64_t block, at::ScalarType scales, bool rotate,
              const char* prefix = "");

// A matrix (R, n) of floats in whole blocks whose rows are contiguous and do not overlap.
void rows(const char* op, const char* name, const at::Tensor& tensor, const Format& format);

// The error (m,) of sum_quantize, which kernels load 16 bytes at a time.
void error(const char* op, const at::Tensor& error, int64_t numel);

// Messages (G, message_bytes(R / G * n)) of these rows.
void messages_of_rows(const char* op, const at::Tensor& messages, const at::Tensor& rows, const Format& format);

// The m of messages (P, message_bytes(m)).
int64_t numel_of_messages(const char* op, const at::Tensor& messages, const Format& format);

// The output (G, message_bytes(m / G)) of sum_quantize.
void summed_output(const char* op, const at::Tensor& output, int64_t numel, const Format& format);

// The parts (P, m) of sum_parts, whose rows are contiguous and do not overlap, and the one that is elsewhere (null:
// none).
void parts(const char* op, const at::Tensor& parts, const at::Tensor* own, int64_t place);

// The sums of the squares of the input, a contiguous vector of floats that is whole blocks of kSquaresBlock.
void sums_of_squares(const char* op, const char* name, const at::Tensor& sums, const char* input_name,
                     const at::Tensor& input);

// A contiguous tensor of one of the types and exactly this shape.
void contiguous(const char* op, const char* name, const at::Tensor& tensor,
                std::initializer_list<at::ScalarType> types, at::IntArrayRef shape);

// A message (message_bytes(m),) of the weights (m,).
void message_of_weights(const char* op, const at::Tensor& message, const at::Tensor& master, const Format& format);

// AdamW's states, all (m,), its scalars on the device and `decayed`.
void adamw(const char* op, std::initializer_list<Named> states, std::initializer_list<Named> scalars,
           int64_t decayed);

void same_device(const char* op, std::initializer_list<Named> tensors);

}  // namespace megatron_zpp::checks
