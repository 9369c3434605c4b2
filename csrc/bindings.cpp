// The operators of torch.ops.megatron_zpp: checks, then launches.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <optional>
#include <string_view>

#include "checks.h"
#include "operations.h"

#ifdef WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace megatron_zpp {

namespace {

using at::ScalarType;
using at::Tensor;

// Runs a checked operation on the device of `where`, on its current stream if it is a GPU.
template <typename Op>
void run_on(const Tensor& where, const Op& op) {
  if (where.is_cpu()) return cpu::run(op);
#ifdef WITH_CUDA
  const c10::cuda::CUDAGuard guard(where.device());
  cuda::run(op, c10::cuda::getCurrentCUDAStream().stream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
#else
  TORCH_CHECK_VALUE(false, "megatron_zpp: no kernels for device ", where.device());
#endif
}

// ---- arguments ----

Type type_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return Type::fp32;
    case at::kBFloat16: return Type::bf16;
    case at::kHalf: return Type::fp16;
    default: TORCH_CHECK_VALUE(false, "megatron_zpp: unknown type ", tensor.scalar_type());
  }
}

Seed seed_of(std::optional<int64_t> seed) { return {seed.has_value(), uint64_t(seed.value_or(0))}; }

const Tensor* given(const std::optional<Tensor>& tensor) { return tensor.has_value() ? &*tensor : nullptr; }

uint8_t* bytes_of(const Tensor& tensor) { return static_cast<uint8_t*>(tensor.mutable_data_ptr()); }
const uint8_t* const_bytes_of(const Tensor& tensor) { return static_cast<const uint8_t*>(tensor.const_data_ptr()); }
float* floats_of(const Tensor& tensor) { return static_cast<float*>(tensor.mutable_data_ptr()); }
const float* const_floats_of(const Tensor& tensor) { return static_cast<const float*>(tensor.const_data_ptr()); }

// ---- operators ----

void quantize(const Tensor& input, const Tensor& messages, std::string_view codes, int64_t block, ScalarType scales,
              bool rotate, std::optional<int64_t> seed) {
  const Format format = checks::format("quantize", codes, block, scales, rotate);
  checks::rows("quantize", "input", input, format);
  checks::messages_of_rows("quantize", messages, input, format);
  checks::same_device("quantize", {{"input", &input}, {"messages", &messages}});
  if (input.numel() == 0) return;
  const Quantize op{input.const_data_ptr(), type_of(input),     input.size(0),    input.size(1), input.stride(0),
                    bytes_of(messages),     messages.size(0),   format,           seed_of(seed)};
  run_on(input, op);
}

void dequantize(const Tensor& messages, const Tensor& output, std::string_view codes, int64_t block,
                ScalarType scales, bool rotate) {
  const Format format = checks::format("dequantize", codes, block, scales, rotate);
  checks::rows("dequantize", "output", output, format);
  checks::messages_of_rows("dequantize", messages, output, format);
  checks::same_device("dequantize", {{"messages", &messages}, {"output", &output}});
  if (output.numel() == 0) return;
  const Dequantize op{const_bytes_of(messages), messages.size(0), format,         output.mutable_data_ptr(),
                      type_of(output),          output.size(0),   output.size(1), output.stride(0)};
  run_on(output, op);
}

void sum_quantize(const Tensor& messages, const Tensor& output, std::string_view codes, int64_t block,
                  ScalarType scales, std::string_view output_codes, int64_t output_block, ScalarType output_scales,
                  const std::optional<Tensor>& error, std::optional<int64_t> seed) {
  const char* name = "sum_quantize";
  const Format format = checks::format(name, codes, block, scales, false);
  const Format output_format = checks::format(name, output_codes, output_block, output_scales, false, "output_");
  const int64_t numel = checks::numel_of_messages(name, messages, format);
  checks::summed_output(name, output, numel, output_format);
  if (error) checks::error(name, *error, numel);
  checks::same_device(name, {{"messages", &messages}, {"output", &output}, {"error", given(error)}});
  if (numel == 0) return;
  const SumQuantize op{const_bytes_of(messages),
                       messages.size(0),
                       numel,
                       format,
                       bytes_of(output),
                       output.size(0),
                       output_format,
                       error ? error->mutable_data_ptr() : nullptr,
                       error ? type_of(*error) : Type::fp32,
                       seed_of(seed)};
  run_on(messages, op);
}

void sum_into(const Tensor& messages, const Tensor& shard, std::string_view codes, int64_t block, ScalarType scales,
              bool rotate, double factor, bool add) {
  const Format format = checks::format("sum_into", codes, block, scales, rotate);
  const int64_t numel = checks::numel_of_messages("sum_into", messages, format);
  checks::contiguous("sum_into", "shard", shard, {at::kFloat}, {numel});
  checks::same_device("sum_into", {{"messages", &messages}, {"shard", &shard}});
  if (numel == 0) return;
  const SumInto op{const_bytes_of(messages), messages.size(0), numel, format, floats_of(shard), float(factor), add};
  run_on(shard, op);
}

void sum_parts(const Tensor& parts, const Tensor& shard, double factor, bool add, const std::optional<Tensor>& own,
               int64_t place, const std::optional<Tensor>& squares) {
  checks::parts("sum_parts", parts, own ? &*own : nullptr, place);
  checks::contiguous("sum_parts", "shard", shard, {at::kFloat}, {parts.size(1)});
  if (squares) checks::sums_of_squares("sum_parts", "squares", *squares, "shard", shard);
  checks::same_device("sum_parts", {{"parts", &parts},
                                    {"shard", &shard},
                                    {"own", own ? &*own : nullptr},
                                    {"squares", squares ? &*squares : nullptr}});
  if (shard.numel() == 0) return;
  const SumParts op{parts.const_data_ptr(),
                    type_of(parts),
                    parts.size(0),
                    parts.size(1),
                    parts.stride(0),
                    own ? own->const_data_ptr() : nullptr,
                    place,
                    floats_of(shard),
                    float(factor),
                    add,
                    squares ? floats_of(*squares) : nullptr};
  run_on(shard, op);
}

void sum_squares(const Tensor& input, const Tensor& sums) {
  checks::sums_of_squares("sum_squares", "sums", sums, "input", input);
  checks::same_device("sum_squares", {{"input", &input}, {"sums", &sums}});
  if (input.numel() == 0) return;
  run_on(input, SumSquares{input.const_data_ptr(), type_of(input), input.numel(), floats_of(sums)});
}

// Products and differences of the numbers are taken in fp64.
Adamw adamw_op(const Tensor& master, const Tensor& gradient, const Tensor& exp_avg, const Tensor& exp_avg_sq,
               const Tensor& divisor, const Tensor& found_inf, const Tensor& bias_corrections, double learning_rate,
               double beta1, double beta2, double eps, double weight_decay, int64_t decayed) {
  const AdamwConstants constants{float(beta1),     float(1 - beta1),
                                 float(beta2),     float(1 - beta2),
                                 float(eps),       float(learning_rate),
                                 float(learning_rate * weight_decay)};
  return {floats_of(master),          gradient.const_data_ptr(),
          type_of(gradient),          floats_of(exp_avg),
          floats_of(exp_avg_sq),      master.numel(),
          decayed,                    const_floats_of(divisor),
          const_floats_of(found_inf), const_floats_of(bias_corrections),
          constants};
}

void adamw(const Tensor& master, const Tensor& gradient, const Tensor& exp_avg, const Tensor& exp_avg_sq,
           const std::optional<Tensor>& published, const Tensor& divisor, const Tensor& found_inf,
           const Tensor& bias_corrections, double learning_rate, double beta1, double beta2, double eps,
           double weight_decay, int64_t decayed) {
  checks::adamw("adamw", {{"master", &master}, {"exp_avg", &exp_avg}, {"exp_avg_sq", &exp_avg_sq}},
                {{"divisor", &divisor}, {"found_inf", &found_inf}, {"bias_corrections", &bias_corrections}}, decayed);
  checks::contiguous("adamw", "gradient", gradient, {at::kFloat, at::kBFloat16, at::kHalf}, {master.numel()});
  if (published)
    checks::contiguous("adamw", "published", *published, {at::kBFloat16, at::kHalf}, {master.numel()});
  checks::same_device("adamw", {{"master", &master},
                                {"gradient", &gradient},
                                {"exp_avg", &exp_avg},
                                {"exp_avg_sq", &exp_avg_sq},
                                {"published", given(published)},
                                {"divisor", &divisor},
                                {"found_inf", &found_inf},
                                {"bias_corrections", &bias_corrections}});
  if (master.numel() == 0) return;
  const AdamwPublish op{adamw_op(master, gradient, exp_avg, exp_avg_sq, divisor, found_inf, bias_corrections,
                                 learning_rate, beta1, beta2, eps, weight_decay, decayed),
                        published ? published->mutable_data_ptr() : nullptr,
                        published ? type_of(*published) : Type::fp32};
  run_on(master, op);
}

void adamw_quantize(const Tensor& master, const Tensor& gradient, const Tensor& exp_avg, const Tensor& exp_avg_sq,
                    const Tensor& message, const Tensor& divisor, const Tensor& found_inf,
                    const Tensor& bias_corrections, double learning_rate, double beta1, double beta2, double eps,
                    double weight_decay, int64_t decayed, std::string_view codes, int64_t block, ScalarType scales,
                    bool rotate) {
  const char* name = "adamw_quantize";
  const Format format = checks::format(name, codes, block, scales, rotate);
  checks::adamw(name,
                {{"master", &master}, {"gradient", &gradient}, {"exp_avg", &exp_avg}, {"exp_avg_sq", &exp_avg_sq}},
                {{"divisor", &divisor}, {"found_inf", &found_inf}, {"bias_corrections", &bias_corrections}}, decayed);
  checks::message_of_weights(name, message, master, format);
  checks::same_device(name, {{"master", &master},
                             {"gradient", &gradient},
                             {"exp_avg", &exp_avg},
                             {"exp_avg_sq", &exp_avg_sq},
                             {"message", &message},
                             {"divisor", &divisor},
                             {"found_inf", &found_inf},
                             {"bias_corrections", &bias_corrections}});
  if (master.numel() == 0) return;
  const AdamwQuantize op{adamw_op(master, gradient, exp_avg, exp_avg_sq, divisor, found_inf, bias_corrections,
                                  learning_rate, beta1, beta2, eps, weight_decay, decayed),
                         bytes_of(message), format};
  run_on(master, op);
}

void register_operators(torch::Library& library) {
  library.impl("quantize", TORCH_FN(quantize));
  library.impl("dequantize", TORCH_FN(dequantize));
  library.impl("sum_quantize", TORCH_FN(sum_quantize));
  library.impl("sum_into", TORCH_FN(sum_into));
  library.impl("sum_parts", TORCH_FN(sum_parts));
  library.impl("sum_squares", TORCH_FN(sum_squares));
  library.impl("adamw", TORCH_FN(adamw));
  library.impl("adamw_quantize", TORCH_FN(adamw_quantize));
}

}  // namespace

TORCH_LIBRARY(megatron_zpp, library) {
  library.def(
      "quantize(Tensor input, Tensor(a!) messages, str codes, int block, ScalarType scales, bool rotate, "
      "int? seed=None) -> ()");
  library.def(
      "dequantize(Tensor messages, Tensor(a!) output, str codes, int block, ScalarType scales, bool rotate) -> ()");
  library.def(
      "sum_quantize(Tensor messages, Tensor(a!) output, str codes, int block, ScalarType scales, "
      "str output_codes, int output_block, ScalarType output_scales, Tensor(b!)? error=None, int? seed=None) -> ()");
  library.def(
      "sum_into(Tensor messages, Tensor(a!) shard, str codes, int block, ScalarType scales, bool rotate, "
      "float factor, bool add) -> ()");
  library.def(
      "sum_parts(Tensor parts, Tensor(a!) shard, float factor, bool add, Tensor? own=None, int place=0, "
      "Tensor(b!)? squares=None) -> ()");
  library.def("sum_squares(Tensor input, Tensor(a!) sums) -> ()");
  library.def(
      "adamw(Tensor(a!) master, Tensor gradient, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? published, "
      "Tensor divisor, Tensor found_inf, Tensor bias_corrections, float learning_rate, float beta1, float beta2, "
      "float eps, float weight_decay, int decayed) -> ()");
  library.def(
      "adamw_quantize(Tensor(a!) master, Tensor gradient, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, "
      "Tensor(d!) message, Tensor divisor, Tensor found_inf, Tensor bias_corrections, float learning_rate, "
      "float beta1, float beta2, float eps, float weight_decay, int decayed, str codes, int block, "
      "ScalarType scales, bool rotate) -> ()");
}

TORCH_LIBRARY_IMPL(megatron_zpp, CPU, library) { register_operators(library); }

#ifdef WITH_CUDA
TORCH_LIBRARY_IMPL(megatron_zpp, CUDA, library) { register_operators(library); }
#endif

}  // namespace megatron_zpp
