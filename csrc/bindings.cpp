// The operators of torch.ops.megatron_zpp: each checks its arguments and launches the operation.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <optional>
#include <string_view>

#include "checks.h"
#include "lloyd_max.h"
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

// Runs a checked operation on the device of `tensor`: on the CPU, or on the current stream of its GPU.
template <typename Op>
void run_on(const Tensor& tensor, const Op& op) {
  if (tensor.is_cpu()) return cpu::run(op);
#ifdef WITH_CUDA
  const c10::cuda::CUDAGuard guard(tensor.device());
  cuda::run(op, c10::cuda::getCurrentCUDAStream().stream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
#else
  TORCH_CHECK_VALUE(false, "megatron_zpp: tensors must be on a CPU, because this library was built without CUDA, got ",
                    tensor.device());
#endif
}

// ---- arguments ----

DType dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return DType::fp32;
    case at::kBFloat16: return DType::bf16;
    case at::kHalf: return DType::fp16;
    default: TORCH_CHECK_VALUE(false, "megatron_zpp: a tensor must be float32, bfloat16 or float16, got ",
                               tensor.scalar_type());
  }
}

const Tensor* provided(const std::optional<Tensor>& tensor) { return tensor ? &*tensor : nullptr; }

uint8_t* bytes_of(const Tensor& tensor) { return static_cast<uint8_t*>(tensor.mutable_data_ptr()); }
const uint8_t* const_bytes_of(const Tensor& tensor) { return static_cast<const uint8_t*>(tensor.const_data_ptr()); }
float* floats_of(const Tensor& tensor) { return static_cast<float*>(tensor.mutable_data_ptr()); }
const float* const_floats_of(const Tensor& tensor) { return static_cast<const float*>(tensor.const_data_ptr()); }

// ---- operators ----

void quantize(const Tensor& input, const Tensor& messages, std::string_view code_type, int64_t block) {
  const Format format = checks::format("quantize", code_type, block);
  checks::rows("quantize", "input", input, format);
  checks::messages_of_rows("quantize", messages, input, format);
  checks::same_device("quantize", {{"input", &input}, {"messages", &messages}});
  if (input.numel() == 0) return;
  const Quantize op{input.const_data_ptr(), dtype_of(input),  input.size(0), input.size(1), input.stride(0),
                    bytes_of(messages),     messages.size(0), format};
  run_on(input, op);
}

void dequantize(const Tensor& messages, const Tensor& output, std::string_view code_type, int64_t block) {
  const Format format = checks::format("dequantize", code_type, block);
  checks::rows("dequantize", "output", output, format);
  checks::messages_of_rows("dequantize", messages, output, format);
  checks::same_device("dequantize", {{"messages", &messages}, {"output", &output}});
  if (output.numel() == 0) return;
  const Dequantize op{const_bytes_of(messages), messages.size(0), format,         output.mutable_data_ptr(),
                      dtype_of(output),         output.size(0),   output.size(1), output.stride(0)};
  run_on(output, op);
}

void sum_quantize(const Tensor& messages, const Tensor& output, std::string_view code_type, int64_t block) {
  const char* name = "sum_quantize";
  const Format format = checks::format(name, code_type, block);
  const int64_t numel = checks::numel_of_messages(name, messages, format);
  checks::summed_output(name, output, numel, format);
  checks::same_device(name, {{"messages", &messages}, {"output", &output}});
  if (numel == 0) return;
  const SumQuantize op{const_bytes_of(messages), messages.size(0), numel, format, bytes_of(output), output.size(0)};
  run_on(messages, op);
}

void sum_into(const Tensor& messages, const Tensor& shard, std::string_view code_type, int64_t block, bool add) {
  const Format format = checks::format("sum_into", code_type, block);
  const int64_t numel = checks::numel_of_messages("sum_into", messages, format);
  checks::contiguous("sum_into", "shard", shard, {at::kFloat}, {numel});
  checks::same_device("sum_into", {{"messages", &messages}, {"shard", &shard}});
  if (numel == 0) return;
  const SumInto op{const_bytes_of(messages), messages.size(0), numel, format, floats_of(shard), add};
  run_on(shard, op);
}

void sum_parts(const Tensor& parts, const Tensor& shard, bool add, const std::optional<Tensor>& own, int64_t group_rank,
               const std::optional<Tensor>& squares) {
  checks::parts("sum_parts", parts, provided(own), group_rank);
  checks::contiguous("sum_parts", "shard", shard, {at::kFloat}, {parts.size(1)});
  if (squares) checks::sums_of_squares("sum_parts", "squares", *squares, "shard", shard);
  checks::same_device("sum_parts", {{"parts", &parts},
                                    {"shard", &shard},
                                    {"own", provided(own)},
                                    {"squares", provided(squares)}});
  if (shard.numel() == 0) return;
  const SumParts op{parts.const_data_ptr(),
                    dtype_of(parts),
                    parts.size(0),
                    parts.size(1),
                    parts.stride(0),
                    own ? own->const_data_ptr() : nullptr,
                    group_rank,
                    floats_of(shard),
                    add,
                    squares ? floats_of(*squares) : nullptr};
  run_on(shard, op);
}

void sum_squares(const Tensor& input, const Tensor& sums) {
  checks::sums_of_squares("sum_squares", "sums", sums, "input", input);
  checks::same_device("sum_squares", {{"input", &input}, {"sums", &sums}});
  if (input.numel() == 0) return;
  run_on(input, SumSquares{input.const_data_ptr(), dtype_of(input), input.numel(), floats_of(sums)});
}

struct AdamwTensors {
  const Tensor &master, &gradient, &exp_avg, &exp_avg_sq;
};

// An operator's schema allows tensors, numbers, strings and lists of them, but no structs. So `packed` of
// megatron_zpp/ops/adamw.py makes two lists of AdamWScalars, and this function, the only one that knows their order,
// makes AdamwScalars of the lists. Products and differences of the host's scalars are computed in fp64.
AdamwScalars unpacked(const char* op, const Tensor& master, at::TensorList device_scalars,
                      at::ArrayRef<double> host_scalars) {
  checks::adamw_scalars(op, master, device_scalars, host_scalars);
  const double learning_rate = host_scalars[0], beta1 = host_scalars[1], beta2 = host_scalars[2];
  const double eps = host_scalars[3], weight_decay = host_scalars[4];
  const AdamwConstants constants{float(beta1),     float(1 - beta1), float(beta2),
                                 float(1 - beta2), float(eps),       float(learning_rate),
                                 float(learning_rate * weight_decay)};
  return {const_floats_of(device_scalars[0]), const_floats_of(device_scalars[1]), const_floats_of(device_scalars[2]),
          constants};
}

AdamwStep adamw_step(const char* op, const AdamwTensors& t, std::initializer_list<ScalarType> gradient_dtypes,
                     at::TensorList device_scalars, at::ArrayRef<double> host_scalars, int64_t decayed) {
  checks::adamw_states(op, {{"master", &t.master}, {"exp_avg", &t.exp_avg}, {"exp_avg_sq", &t.exp_avg_sq}}, decayed);
  checks::contiguous(op, "gradient", t.gradient, gradient_dtypes, {t.master.numel()});
  checks::same_device(op, {{"master", &t.master},
                           {"gradient", &t.gradient},
                           {"exp_avg", &t.exp_avg},
                           {"exp_avg_sq", &t.exp_avg_sq}});
  const AdamwScalars scalars = unpacked(op, t.master, device_scalars, host_scalars);
  return {floats_of(t.master),     t.gradient.const_data_ptr(), dtype_of(t.gradient), floats_of(t.exp_avg),
          floats_of(t.exp_avg_sq), t.master.numel(),            decayed,              scalars};
}

void adamw(const Tensor& master, const Tensor& gradient, const Tensor& exp_avg, const Tensor& exp_avg_sq,
           const std::optional<Tensor>& gather_source, at::TensorList device_scalars,
           at::ArrayRef<double> host_scalars, int64_t decayed) {
  const AdamwStep step = adamw_step("adamw", {master, gradient, exp_avg, exp_avg_sq},
                                    {at::kFloat, at::kBFloat16, at::kHalf}, device_scalars, host_scalars, decayed);
  if (gather_source)
    checks::contiguous("adamw", "gather_source", *gather_source, {at::kBFloat16, at::kHalf}, {master.numel()});
  checks::same_device("adamw", {{"master", &master}, {"gather_source", provided(gather_source)}});
  if (step.elements == 0) return;
  run_on(master, Adamw{step, gather_source ? gather_source->mutable_data_ptr() : nullptr,
                       gather_source ? dtype_of(*gather_source) : DType::fp32});
}

void adamw_quantize(const Tensor& master, const Tensor& gradient, const Tensor& exp_avg, const Tensor& exp_avg_sq,
                    const Tensor& message, at::TensorList device_scalars, at::ArrayRef<double> host_scalars,
                    int64_t decayed, std::string_view code_type, int64_t block) {
  const char* name = "adamw_quantize";
  const Format format = checks::format(name, code_type, block);
  const AdamwStep step = adamw_step(name, {master, gradient, exp_avg, exp_avg_sq}, {at::kFloat}, device_scalars,
                                    host_scalars, decayed);
  checks::message_of_weights(name, message, master, format);
  checks::same_device(name, {{"master", &master}, {"message", &message}});
  if (step.elements == 0) return;
  run_on(master, AdamwQuantize{step, bytes_of(message), format});
}

// A moment in whichever form its dtype says; fp16 and fp8, as bytes, have scales.
StateTensor state_tensor(const char* op, const char* name, const Tensor& values, const char* scales_name,
                         const std::optional<Tensor>& scales, const Tensor& master) {
  checks::state(op, name, values, scales_name, provided(scales), master);
  const StateForm form = values.scalar_type() == at::kByte     ? StateForm::fp8
                         : values.scalar_type() == at::kHalf     ? StateForm::fp16
                         : values.scalar_type() == at::kBFloat16 ? StateForm::bf16
                                                                 : StateForm::fp32;
  return {values.mutable_data_ptr(), scales ? bytes_of(*scales) : nullptr, form};
}

void adamw_compact(const Tensor& master, const Tensor& gradient, const Tensor& exp_avg,
                   const std::optional<Tensor>& exp_avg_scales, const Tensor& exp_avg_sq,
                   const std::optional<Tensor>& exp_avg_sq_scales, const std::optional<Tensor>& gather_source,
                   at::TensorList device_scalars, at::ArrayRef<double> host_scalars, int64_t decayed,
                   const Tensor& step, int64_t seed, int64_t unit, int64_t first) {
  const char* name = "adamw_compact";
  const bool split = master.scalar_type() == at::kByte;
  checks::compact_weights(name, master, provided(gather_source), decayed);
  checks::contiguous(name, "gradient", gradient, {at::kFloat, at::kBFloat16, at::kHalf}, {master.numel()});
  checks::flat(name, "gradient", gradient, {at::kFloat, at::kBFloat16, at::kHalf}, kStateBlock);
  const StateTensor average = state_tensor(name, "exp_avg", exp_avg, "exp_avg_scales", exp_avg_scales, master);
  const StateTensor square =
      state_tensor(name, "exp_avg_sq", exp_avg_sq, "exp_avg_sq_scales", exp_avg_sq_scales, master);
  checks::contiguous(name, "step", step, {at::kFloat}, at::IntArrayRef());
  checks::same_device(name, {{"master", &master},
                             {"gradient", &gradient},
                             {"exp_avg", &exp_avg},
                             {"exp_avg_scales", provided(exp_avg_scales)},
                             {"exp_avg_sq", &exp_avg_sq},
                             {"exp_avg_sq_scales", provided(exp_avg_sq_scales)},
                             {"gather_source", provided(gather_source)},
                             {"step", &step}});
  const AdamwScalars scalars = unpacked(name, master, device_scalars, host_scalars);
  const Rounding rounding = checks::rounding(name, seed, unit, first, const_floats_of(step));
  if (master.numel() == 0) return;
  run_on(master, AdamwCompact{master.mutable_data_ptr(),
                              split,
                              gradient.const_data_ptr(),
                              dtype_of(gradient),
                              average,
                              square,
                              master.numel(),
                              decayed,
                              gather_source ? gather_source->mutable_data_ptr() : nullptr,
                              gather_source ? dtype_of(*gather_source) : DType::fp32,
                              scalars,
                              rounding});
}

// ---- Lloyd-Max codes ----

void quantize_difference(const Tensor& weights, const Tensor& reference, const Tensor& message, int64_t bits,
                         int64_t block, const std::optional<Tensor>& skip, const std::optional<Tensor>& squares) {
  const char* name = "quantize_difference";
  const LloydMaxFormat format = checks::lloyd_max(name, bits, block);
  checks::flat(name, "weights", weights, {at::kFloat}, block);
  checks::contiguous(name, "reference", reference, {at::kFloat}, weights.sizes());
  checks::flat(name, "reference", reference, {at::kFloat}, block);
  checks::lloyd_max_messages(name, "message", message.unsqueeze(0), weights.numel(), format);
  if (skip) checks::contiguous(name, "skip", *skip, {at::kFloat}, at::IntArrayRef());
  if (squares) checks::contiguous(name, "squares", *squares, {at::kFloat}, {2, weights.numel() / block});
  checks::same_device(name, {{"weights", &weights},
                             {"reference", &reference},
                             {"message", &message},
                             {"skip", provided(skip)},
                             {"squares", provided(squares)}});
  if (weights.numel() == 0) return;
  run_on(weights, QuantizeDifference{const_floats_of(weights), const_floats_of(reference), weights.numel(),
                                     bytes_of(message), format, skip ? const_floats_of(*skip) : nullptr,
                                     squares ? floats_of(*squares) : nullptr});
}

void add_difference(const Tensor& messages, const Tensor& reference, int64_t bits, int64_t block) {
  const char* name = "add_difference";
  const LloydMaxFormat format = checks::lloyd_max(name, bits, block);
  checks::flat(name, "reference", reference, {at::kFloat}, block);
  const int64_t numel = checks::lloyd_max_messages(name, "messages", messages, reference.numel(), format);
  checks::same_device(name, {{"messages", &messages}, {"reference", &reference}});
  if (numel == 0) return;
  run_on(reference, AddDifference{const_bytes_of(messages), messages.size(0), numel, floats_of(reference), format});
}

void quantize_rotated(const Tensor& input, const Tensor& messages, int64_t bits, int64_t block, int64_t seed,
                      int64_t unit, int64_t iteration, int64_t first, const std::optional<Tensor>& lost,
                      const std::optional<Tensor>& divisor) {
  const char* name = "quantize_rotated";
  const LloydMaxFormat format = checks::lloyd_max(name, bits, block);
  checks::flat(name, "input", input, {at::kFloat, at::kBFloat16, at::kHalf}, block);
  const int64_t numel = checks::lloyd_max_messages(name, "messages", messages, input.numel(), format);
  if (lost) checks::feedback(name, *lost, provided(divisor), messages.size(0), numel);
  checks::same_device(name, {{"input", &input},
                             {"messages", &messages},
                             {"lost", provided(lost)},
                             {"divisor", provided(divisor)}});
  const Signs signs = checks::signs(name, seed, unit, iteration, first);
  if (numel == 0) return;
  Feedback feedback{};
  if (lost) feedback = {static_cast<Bf16*>(lost->mutable_data_ptr()), lost->stride(0), const_floats_of(*divisor)};
  run_on(input, QuantizeRotated{input.const_data_ptr(), dtype_of(input), input.numel(), bytes_of(messages),
                                messages.size(0), format, signs, feedback});
}

void sum_rotated(const Tensor& messages, const Tensor& shard, int64_t bits, int64_t block, int64_t seed, int64_t unit,
                 int64_t iteration, int64_t first, bool add) {
  const char* name = "sum_rotated";
  const LloydMaxFormat format = checks::lloyd_max(name, bits, block);
  checks::flat(name, "shard", shard, {at::kFloat}, block);
  checks::lloyd_max_messages(name, "messages", messages, messages.size(0) * shard.numel(), format);
  checks::same_device(name, {{"messages", &messages}, {"shard", &shard}});
  const Signs signs = checks::signs(name, seed, unit, iteration, first);
  if (shard.numel() == 0) return;
  run_on(shard, SumRotated{const_bytes_of(messages), messages.size(0), shard.numel(), floats_of(shard), format,
                           signs, add});
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
  library.impl("adamw_compact", TORCH_FN(adamw_compact));
  library.impl("quantize_difference", TORCH_FN(quantize_difference));
  library.impl("add_difference", TORCH_FN(add_difference));
  library.impl("quantize_rotated", TORCH_FN(quantize_rotated));
  library.impl("sum_rotated", TORCH_FN(sum_rotated));
}

}  // namespace

TORCH_LIBRARY(megatron_zpp, library) {
  library.def("quantize(Tensor input, Tensor(a!) messages, str code_type, int block) -> ()");
  library.def("dequantize(Tensor messages, Tensor(a!) output, str code_type, int block) -> ()");
  library.def("sum_quantize(Tensor messages, Tensor(a!) output, str code_type, int block) -> ()");
  library.def(
      "sum_into(Tensor messages, Tensor(a!) shard, str code_type, int block, bool add) -> ()");
  library.def(
      "sum_parts(Tensor parts, Tensor(a!) shard, bool add, Tensor? own=None, int group_rank=0, "
      "Tensor(b!)? squares=None) -> ()");
  library.def("sum_squares(Tensor input, Tensor(a!) sums) -> ()");
  library.def(
      "adamw(Tensor(a!) master, Tensor gradient, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, "
      "Tensor(d!)? gather_source, Tensor[] device_scalars, float[] host_scalars, int decayed) -> ()");
  library.def(
      "adamw_quantize(Tensor(a!) master, Tensor gradient, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, "
      "Tensor(d!) message, Tensor[] device_scalars, float[] host_scalars, int decayed, str code_type, "
      "int block) -> ()");
  library.def(
      "adamw_compact(Tensor(a!) master, Tensor gradient, Tensor(b!) exp_avg, Tensor(c!)? exp_avg_scales, "
      "Tensor(d!) exp_avg_sq, Tensor(e!)? exp_avg_sq_scales, Tensor(f!)? gather_source, Tensor[] device_scalars, "
      "float[] host_scalars, int decayed, Tensor step, int seed, int unit, int first) -> ()");
  library.def(
      "quantize_difference(Tensor weights, Tensor reference, Tensor(a!) message, int bits, int block, "
      "Tensor? skip=None, Tensor(b!)? squares=None) -> ()");
  library.def("add_difference(Tensor messages, Tensor(a!) reference, int bits, int block) -> ()");
  library.def(
      "quantize_rotated(Tensor input, Tensor(a!) messages, int bits, int block, int seed, int unit, int iteration, "
      "int first, Tensor(b!)? lost=None, Tensor? divisor=None) -> ()");
  library.def(
      "sum_rotated(Tensor messages, Tensor(a!) shard, int bits, int block, int seed, int unit, int iteration, "
      "int first, bool add) -> ()");
}

TORCH_LIBRARY_IMPL(megatron_zpp, CPU, library) { register_operators(library); }

#ifdef WITH_CUDA
TORCH_LIBRARY_IMPL(megatron_zpp, CUDA, library) { register_operators(library); }
#endif

}  // namespace megatron_zpp
