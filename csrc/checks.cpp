// The checks of the operators' arguments.
#include "checks.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string>

#include "operations.h"

namespace megatron_zpp::checks {

namespace {

constexpr std::initializer_list<at::ScalarType> kFloats = {at::kFloat, at::kBFloat16, at::kHalf};

std::string name_of(at::ScalarType type) { return std::string(c10::getDtypeNames(type).first); }

// Numbers go into messages as strings: where torch brings a C++ library of its own, a stream that formats a number
// can end the process.
std::string text(int64_t number) { return std::to_string(number); }

// In the form of a Python tuple.
std::string shown(at::IntArrayRef values) {
  std::string shape = "(";
  for (size_t i = 0; i < values.size(); ++i) shape += (i ? ", " : "") + text(values[i]);
  return shape + (values.size() == 1 ? ",)" : ")");
}

std::string shown(const at::Tensor& tensor) {
  return "torch." + name_of(tensor.scalar_type()) + " " + shown(tensor.sizes());
}

bool is_one_of(at::ScalarType dtype, std::initializer_list<at::ScalarType> dtypes) {
  return std::find(dtypes.begin(), dtypes.end(), dtype) != dtypes.end();
}

void checked_block(const char* op, int64_t block) {
  TORCH_CHECK_VALUE(block >= kSmallestBlock && block <= kLargestBlock && (block & (block - 1)) == 0, op,
                    ": block must be a power of two from ", text(kSmallestBlock), " to ", text(kLargestBlock), ", got ",
                    text(block));
}

// The number of rows of a matrix; 0 for a tensor of other than two dimensions.
int64_t count_of(const at::Tensor& matrix) { return matrix.dim() == 2 ? matrix.size(0) : 0; }

// Kernels load and store 16 bytes at a time.
void aligned(const char* op, const char* name, const at::Tensor& tensor) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  TORCH_CHECK_VALUE(address % kMessageAlignment == 0, op, ": the address of ", name, " must be a multiple of ",
                    text(kMessageAlignment), ", got a remainder of ", text(address % kMessageAlignment));
}

// Rows must be contiguous and must not overlap.
void contiguous_rows(const char* op, const char* name, const at::Tensor& matrix) {
  const int64_t count = matrix.size(0), n = matrix.size(1);
  const bool valid = (n <= 1 || matrix.stride(1) == 1) && (count <= 1 || matrix.stride(0) >= n);
  TORCH_CHECK_VALUE(valid || matrix.numel() == 0, op, ": ", name, " must have contiguous rows at least ", text(n),
                    " elements apart, got strides ", shown(matrix.strides()));
}

// An aligned uint8 tensor of this shape. Each of its messages is aligned too, because their sizes are multiples of 16.
void messages(const char* op, const char* name, const at::Tensor& tensor, at::IntArrayRef shape) {
  contiguous(op, name, tensor, {at::kByte}, shape);
  aligned(op, name, tensor);
}

}  // namespace

Format format(const char* op, std::string_view code_type, int64_t block) {
  TORCH_CHECK_VALUE(code_type == "int8" || code_type == "int4", op, ": code_type must be int8 or int4, got ",
                    code_type);
  checked_block(op, block);
  return {code_type == "int8" ? CodeType::int8 : CodeType::int4, int(block)};
}

void rows(const char* op, const char* name, const at::Tensor& tensor, const Format& format) {
  TORCH_CHECK_VALUE(tensor.dim() == 2 && is_one_of(tensor.scalar_type(), kFloats), op, ": ", name,
                    " must be float32, bfloat16 or float16 of shape (R, n), got ", shown(tensor));
  const int64_t n = tensor.size(1);
  TORCH_CHECK_VALUE(n % format.block == 0, op, ": block must divide the ", text(n), " columns of ", name, ", got ",
                    text(format.block));
  contiguous_rows(op, name, tensor);
}

void messages_of_rows(const char* op, const at::Tensor& tensor, const at::Tensor& rows, const Format& format) {
  const int64_t groups = count_of(tensor), count = rows.size(0);
  TORCH_CHECK_VALUE(groups >= 1 && count % groups == 0, op, ": messages must have G >= 1 rows, where G divides the ",
                    text(count), " rows of values, got ", shown(tensor));
  messages(op, "messages", tensor, {groups, message_layout(format, count / groups * rows.size(1)).bytes});
}

int64_t numel_of_messages(const char* op, const at::Tensor& tensor, const Format& format) {
  TORCH_CHECK_VALUE(count_of(tensor) >= 1, op, ": messages must be uint8 of shape (P >= 1, bytes), got ",
                    shown(tensor));
  const int64_t block_bytes = message_layout(format, format.block).used_bytes;
  const int64_t numel = tensor.size(1) / block_bytes * format.block;
  messages(op, "messages", tensor, {tensor.size(0), message_layout(format, numel).bytes});
  return numel;
}

void summed_output(const char* op, const at::Tensor& output, int64_t numel, const Format& format) {
  const int64_t groups = count_of(output);
  TORCH_CHECK_VALUE(groups >= 1 && numel % (groups * format.block) == 0, op,
                    ": output must have G >= 1 rows, where G divides the ", text(numel),
                    " summed elements into whole blocks of ", text(format.block), ", got ", shown(output));
  messages(op, "output", output, {groups, message_layout(format, numel / groups).bytes});
}

void parts(const char* op, const at::Tensor& parts, const at::Tensor* own, int64_t group_rank) {
  TORCH_CHECK_VALUE(count_of(parts) >= 1 && is_one_of(parts.scalar_type(), kFloats), op,
                    ": parts must be float32, bfloat16 or float16 of shape (P >= 1, m), got ", shown(parts));
  contiguous_rows(op, "parts", parts);
  TORCH_CHECK_VALUE(group_rank >= 0 && group_rank < parts.size(0), op, ": group_rank must be from 0 to ",
                    text(parts.size(0) - 1), ", got ", text(group_rank));
  if (own) contiguous(op, "own", *own, {parts.scalar_type()}, {parts.size(1)});
}

void sums_of_squares(const char* op, const char* name, const at::Tensor& sums, const char* input_name,
                     const at::Tensor& input) {
  const int64_t numel = input.numel();
  TORCH_CHECK_VALUE(input.dim() == 1 && is_one_of(input.scalar_type(), kFloats) && input.is_contiguous() &&
                        numel % kSquaresBlock == 0,
                    op, ": ", input_name,
                    " must be contiguous float32, bfloat16 or float16 of shape (m,), m a multiple of ", text(kSquaresBlock),
                    ", got ", shown(input));
  contiguous(op, name, sums, {at::kFloat}, {numel / kSquaresBlock});
}

void contiguous(const char* op, const char* name, const at::Tensor& tensor,
                std::initializer_list<at::ScalarType> dtypes, at::IntArrayRef shape) {
  if (!is_one_of(tensor.scalar_type(), dtypes) || tensor.sizes() != shape) {
    std::string wanted;
    for (const at::ScalarType dtype : dtypes) wanted += (wanted.empty() ? "" : " or ") + name_of(dtype);
    TORCH_CHECK_VALUE(false, op, ": ", name, " must be ", wanted, " of shape ", shown(shape), ", got ",
                      shown(tensor));
  }
  TORCH_CHECK_VALUE(tensor.is_contiguous(), op, ": ", name, " must be contiguous, got strides ",
                    shown(tensor.strides()));
}

void message_of_weights(const char* op, const at::Tensor& message, const at::Tensor& master, const Format& format) {
  const int64_t numel = master.numel();
  TORCH_CHECK_VALUE(numel % format.block == 0, op, ": master must hold whole blocks of ", text(format.block),
                    " elements, got ", shown(master));
  messages(op, "message", message, {message_layout(format, numel).bytes});
}

void adamw_states(const char* op, std::initializer_list<Named> states, int64_t decayed) {
  const at::Tensor& master = *states.begin()->second;
  TORCH_CHECK_VALUE(master.dim() == 1, op, ": master must be float32 of shape (m,), got ", shown(master));
  for (const auto& [name, tensor] : states) contiguous(op, name, *tensor, {at::kFloat}, {master.numel()});
  TORCH_CHECK_VALUE(0 <= decayed && decayed <= master.numel(), op, ": decayed must be from 0 to ", text(master.numel()),
                    ", got ", text(decayed));
}

void compact_weights(const char* op, const at::Tensor& master, const at::Tensor* gather_source, int64_t decayed) {
  flat(op, "master", master, {at::kFloat, at::kByte}, kStateBlock);
  const bool split = master.scalar_type() == at::kByte;
  TORCH_CHECK_VALUE(!split || gather_source, op, ": gather_source must be given with a master of bytes, got None");
  if (gather_source && split) contiguous(op, "gather_source", *gather_source, {at::kBFloat16}, {master.numel()});
  if (gather_source && !split)
    contiguous(op, "gather_source", *gather_source, {at::kBFloat16, at::kHalf}, {master.numel()});
  if (gather_source) aligned(op, "gather_source", *gather_source);
  TORCH_CHECK_VALUE(0 <= decayed && decayed <= master.numel(), op, ": decayed must be from 0 to ", text(master.numel()),
                    ", got ", text(decayed));
}

void state(const char* op, const char* name, const at::Tensor& values, const char* scales_name,
           const at::Tensor* scales, const at::Tensor& master) {
  contiguous(op, name, values, {at::kFloat, at::kBFloat16, at::kHalf, at::kByte}, {master.numel()});
  aligned(op, name, values);
  const bool scaled = values.scalar_type() == at::kHalf || values.scalar_type() == at::kByte;
  TORCH_CHECK_VALUE(scaled == (scales != nullptr), op, ": ", scales_name, " must be given if ", name,
                    " is float16 or uint8, and only then, got ", shown(values));
  if (scales) contiguous(op, scales_name, *scales, {at::kByte}, {master.numel() / kStateBlock});
}

Rounding rounding(const char* op, int64_t seed, int64_t unit, int64_t first, const float* step) {
  TORCH_CHECK_VALUE(first >= 0 && first % kStateBlock == 0, op, ": first must be a multiple of ", text(kStateBlock),
                    ", got ", text(first));
  return {philox_keys(uint64_t(seed)), uint32_t(unit), uint64_t(first) / kStateBlock, step};
}

void adamw_scalars(const char* op, const at::Tensor& master, at::TensorList device_scalars,
                   at::ArrayRef<double> host_scalars) {
  TORCH_CHECK_VALUE(device_scalars.size() == 3, op,
                    ": device_scalars must be [divisor, found_inf, bias_corrections], got ", text(device_scalars.size()),
                    " tensors");
  TORCH_CHECK_VALUE(host_scalars.size() == 5, op,
                    ": host_scalars must be [learning_rate, beta1, beta2, eps, weight_decay], got ",
                    text(host_scalars.size()), " numbers");
  contiguous(op, "divisor", device_scalars[0], {at::kFloat}, {});
  contiguous(op, "found_inf", device_scalars[1], {at::kFloat}, {});
  contiguous(op, "bias_corrections", device_scalars[2], {at::kFloat}, {2});
  same_device(op, {{"master", &master},
                   {"divisor", &device_scalars[0]},
                   {"found_inf", &device_scalars[1]},
                   {"bias_corrections", &device_scalars[2]}});
}

void same_device(const char* op, std::initializer_list<Named> tensors) {
  const auto& [first, first_tensor] = *tensors.begin();
  const at::Device device = first_tensor->device();
  for (const auto& [name, tensor] : tensors) {
    TORCH_CHECK_VALUE(tensor == nullptr || tensor->device() == device, op, ": ", name,
                      " must be on the device of ", first, ", ", device, ", got ", tensor->device());
  }
}

LloydMaxFormat lloyd_max(const char* op, int64_t bits, int64_t block) {
  TORCH_CHECK_VALUE(bits == 2 || bits == 4, op, ": bits must be 2 or 4, got ", text(bits));
  checked_block(op, block);
  return {int(bits), int(block)};
}

void flat(const char* op, const char* name, const at::Tensor& tensor, std::initializer_list<at::ScalarType> dtypes,
          int64_t block) {
  const int64_t numel = tensor.dim() == 1 ? tensor.size(0) : -1;
  const char* kinds = is_one_of(at::kByte, dtypes) ? "floats or bytes" : "floats";
  TORCH_CHECK_VALUE(numel >= 0 && numel % block == 0 && is_one_of(tensor.scalar_type(), dtypes) &&
                        tensor.is_contiguous(),
                    op, ": ", name, " must be contiguous ", kinds, " of shape (m,), m a multiple of ", text(block),
                    ", got ", shown(tensor));
  aligned(op, name, tensor);
}

int64_t lloyd_max_messages(const char* op, const char* name, const at::Tensor& tensor, int64_t numel,
                           const LloydMaxFormat& format) {
  const int64_t groups = count_of(tensor);
  TORCH_CHECK_VALUE(groups >= 1 && numel % (groups * format.block) == 0, op, ": ", name,
                    " must have G >= 1 rows, where G divides ", text(numel), " elements into whole blocks of ",
                    text(format.block), ", got ", shown(tensor));
  messages(op, name, tensor, {groups, message_layout(format, numel / groups).bytes});
  return numel / groups;
}

void feedback(const char* op, const at::Tensor& lost, const at::Tensor* divisor, int64_t groups, int64_t numel) {
  TORCH_CHECK_VALUE(lost.scalar_type() == at::kBFloat16 && lost.sizes() == at::IntArrayRef({groups, numel}), op,
                    ": lost must be bfloat16 of shape (", text(groups), ", ", text(numel), "), got ", shown(lost));
  contiguous_rows(op, "lost", lost);
  TORCH_CHECK_VALUE(groups <= 1 || lost.stride(0) * lost.element_size() % kMessageAlignment == 0, op,
                    ": rows of lost must begin a multiple of ", text(kMessageAlignment), " bytes apart, got strides ",
                    shown(lost.strides()));
  aligned(op, "lost", lost);
  TORCH_CHECK_VALUE(divisor, op, ": divisor must be given with lost, got None");
  contiguous(op, "divisor", *divisor, {at::kFloat}, at::IntArrayRef());
}

Signs signs(const char* op, int64_t seed, int64_t unit, int64_t iteration, int64_t first) {
  TORCH_CHECK_VALUE(first >= 0 && first % 128 == 0, op, ": first must be a multiple of 128, got ", text(first));
  return {philox_keys(uint64_t(seed)), uint32_t(unit), uint32_t(iteration), uint64_t(first)};
}

}  // namespace megatron_zpp::checks
