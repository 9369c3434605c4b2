// What each operator accepts: the checks.
#include "checks.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>
#include <string>

#include "operations.h"

namespace megatron_zpp::checks {

namespace {

constexpr std::initializer_list<at::ScalarType> kFloats = {at::kFloat, at::kBFloat16, at::kHalf};

std::string name_of(at::ScalarType type) { return std::string(c10::getDtypeNames(type).first); }

// As Python shows a tuple.
std::string shown(at::IntArrayRef values) {
  std::ostringstream text;
  text << '(';
  for (size_t i = 0; i < values.size(); ++i) text << (i ? ", " : "") << values[i];
  text << (values.size() == 1 ? ",)" : ")");
  return text.str();
}

std::string shown(const at::Tensor& tensor) {
  return "torch." + name_of(tensor.scalar_type()) + " " + shown(tensor.sizes());
}

bool is_one_of(at::ScalarType type, std::initializer_list<at::ScalarType> types) {
  return std::find(types.begin(), types.end(), type) != types.end();
}

bool is_block(int64_t block) {
  return block >= kSmallestBlock && block <= kLargestBlock && (block & (block - 1)) == 0;
}

// How many rows a matrix has; 0 where it is none.
int64_t count_of(const at::Tensor& matrix) { return matrix.dim() == 2 ? matrix.size(0) : 0; }

// A tensor that begins where 16 bytes can be loaded or stored at once.
void aligned(const char* op, const char* name, const at::Tensor& tensor) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  TORCH_CHECK_VALUE(address % kMessageAlignment == 0, op, ": ", name, " must begin at a multiple of ",
                    kMessageAlignment, " bytes, got one ", address % kMessageAlignment, " bytes behind it");
}

// A matrix whose rows are contiguous and do not overlap.
void contiguous_rows(const char* op, const char* name, const at::Tensor& matrix) {
  const int64_t count = matrix.size(0), n = matrix.size(1);
  const bool right = (n <= 1 || matrix.stride(1) == 1) && (count <= 1 || matrix.stride(0) >= n);
  TORCH_CHECK_VALUE(right || matrix.numel() == 0, op, ": ", name, " must have contiguous rows at least ", n,
                    " elements apart, got strides ", shown(matrix.strides()));
}

// A uint8 tensor of this shape, aligned; then so are all its messages.
void messages(const char* op, const char* name, const at::Tensor& tensor, at::IntArrayRef shape) {
  contiguous(op, name, tensor, {at::kByte}, shape);
  aligned(op, name, tensor);
}

}  // namespace

Format format(const char* op, std::string_view codes, int64_t block, at::ScalarType scales, bool rotate,
              const char* prefix) {
  TORCH_CHECK_VALUE(codes == "int8" || codes == "int4" || codes == "fp8", op, ": ", prefix,
                    "codes must be int8, int4 or fp8, got ", codes);
  TORCH_CHECK_VALUE(is_block(block), op, ": ", prefix, "block must be a power of two from ", kSmallestBlock, " to ",
                    kLargestBlock, ", got ", block);
  TORCH_CHECK_VALUE(scales == at::kBFloat16 || scales == at::kFloat, op, ": ", prefix,
                    "scales must be bfloat16 or float32, got torch.", name_of(scales));
  return {codes == "int8" ? Codes::int8 : codes == "int4" ? Codes::int4 : Codes::fp8, int(block),
          scales == at::kFloat ? Scales::fp32 : Scales::bf16, rotate};
}

void rows(const char* op, const char* name, const at::Tensor& tensor, const Format& format) {
  TORCH_CHECK_VALUE(tensor.dim() == 2 && is_one_of(tensor.scalar_type(), kFloats), op, ": ", name,
                    " must be float32, bfloat16 or float16 of shape (R, n), got ", shown(tensor));
  const int64_t n = tensor.size(1);
  TORCH_CHECK_VALUE(n % format.block == 0, op, ": block must divide the ", n, " columns of ", name, ", got ",
                    format.block);
  contiguous_rows(op, name, tensor);
}

void error(const char* op, const at::Tensor& error, int64_t numel) {
  contiguous(op, "error", error, kFloats, {numel});
  aligned(op, "error", error);
}

void messages_of_rows(const char* op, const at::Tensor& tensor, const at::Tensor& rows, const Format& format) {
  const int64_t groups = count_of(tensor), count = rows.size(0);
  TORCH_CHECK_VALUE(groups >= 1 && count % groups == 0, op, ": messages must have G >= 1 rows, where G divides ",
                    count, ", got ", shown(tensor));
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
                    ": output must have G >= 1 rows, each for whole blocks of ", format.block, " of the ", numel,
                    " summed elements, got ", shown(output));
  messages(op, "output", output, {groups, message_layout(format, numel / groups).bytes});
}

void parts(const char* op, const at::Tensor& parts, const at::Tensor* own, int64_t place) {
  TORCH_CHECK_VALUE(count_of(parts) >= 1 && is_one_of(parts.scalar_type(), kFloats), op,
                    ": parts must be float32, bfloat16 or float16 of shape (P >= 1, m), got ", shown(parts));
  contiguous_rows(op, "parts", parts);
  TORCH_CHECK_VALUE(place >= 0 && place < parts.size(0), op, ": place must be from 0 to ", parts.size(0) - 1, ", got ",
                    place);
  if (own) contiguous(op, "own", *own, {parts.scalar_type()}, {parts.size(1)});
}

void sums_of_squares(const char* op, const char* name, const at::Tensor& sums, const char* input_name,
                     const at::Tensor& input) {
  const int64_t numel = input.numel();
  TORCH_CHECK_VALUE(input.dim() == 1 && is_one_of(input.scalar_type(), kFloats) && input.is_contiguous() &&
                        numel % kSquaresBlock == 0,
                    op, ": ", input_name,
                    " must be contiguous float32, bfloat16 or float16 of shape (m,), m a multiple of ", kSquaresBlock,
                    ", got ", shown(input));
  contiguous(op, name, sums, {at::kFloat}, {numel / kSquaresBlock});
}

void contiguous(const char* op, const char* name, const at::Tensor& tensor,
                std::initializer_list<at::ScalarType> types, at::IntArrayRef shape) {
  if (!is_one_of(tensor.scalar_type(), types) || tensor.sizes() != shape) {
    std::string wanted;
    for (const at::ScalarType type : types) wanted += (wanted.empty() ? "" : " or ") + name_of(type);
    TORCH_CHECK_VALUE(false, op, ": ", name, " must be ", wanted, " of shape ", shown(shape), ", got ",
                      shown(tensor));
  }
  TORCH_CHECK_VALUE(tensor.is_contiguous(), op, ": ", name, " must be contiguous, got strides ",
                    shown(tensor.strides()));
}

void message_of_weights(const char* op, const at::Tensor& message, const at::Tensor& master, const Format& format) {
  const int64_t numel = master.numel();
  TORCH_CHECK_VALUE(numel % format.block == 0, op, ": master must hold whole blocks of ", format.block,
                    " elements, got ", shown(master));
  messages(op, "message", message, {message_layout(format, numel).bytes});
}

void adamw(const char* op, std::initializer_list<Named> states, std::initializer_list<Named> scalars,
           int64_t decayed) {
  const at::Tensor& master = *states.begin()->second;
  TORCH_CHECK_VALUE(master.dim() == 1, op, ": master must be float32 of shape (m,), got ", shown(master));
  for (const auto& [name, tensor] : states) contiguous(op, name, *tensor, {at::kFloat}, {master.numel()});
  for (const auto& [name, tensor] : scalars) {
    const bool is_pair = std::string_view(name) == "bias_corrections";
    contiguous(op, name, *tensor, {at::kFloat}, is_pair ? at::IntArrayRef{2} : at::IntArrayRef{});
  }
  TORCH_CHECK_VALUE(0 <= decayed && decayed <= master.numel(), op, ": decayed must be from 0 to ", master.numel(),
                    ", got ", decayed);
}

void same_device(const char* op, std::initializer_list<Named> tensors) {
  const auto& [first, given] = *tensors.begin();
  const at::Device device = given->device();
  for (const auto& [name, tensor] : tensors) {
    TORCH_CHECK_VALUE(tensor == nullptr || tensor->device() == device, op, ": ", name,
                      " must be on the device of ", first, ", ", device, ", got ", tensor->device());
  }
}

}  // namespace megatron_zpp::checks
