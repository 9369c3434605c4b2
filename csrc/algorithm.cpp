// Names of algorithms of products.
#include <cstring>
#include <stdexcept>

#include "product.h"

namespace megatron_zpp {

namespace {

constexpr char kDigits[] = "0123456789abcdef";

int value_of(char digit) {
  const char* found = digit == 0 ? nullptr : std::strchr(kDigits, digit);
  if (found == nullptr)
    throw std::invalid_argument("product: algorithm must consist of the digits 0 to 9 and a to f");
  return int(found - kDigits);
}

}  // namespace

std::string Algorithm::name() const {
  uint8_t bytes[sizeof(Algorithm)];
  std::memcpy(bytes, this, sizeof bytes);
  std::string name;
  for (const uint8_t byte : bytes) {
    name += kDigits[byte >> 4];
    name += kDigits[byte & 15];
  }
  return name;
}

Algorithm Algorithm::named(std::string_view name) {
  Algorithm algorithm;
  uint8_t bytes[sizeof(Algorithm)];
  if (name.size() != 2 * sizeof bytes)
    throw std::invalid_argument("product: algorithm must be a name of " + std::to_string(2 * sizeof bytes) +
                                " digits, got " + std::to_string(name.size()));
  for (size_t i = 0; i < sizeof bytes; ++i)
    bytes[i] = uint8_t(value_of(name[2 * i]) << 4 | value_of(name[2 * i + 1]));
  std::memcpy(&algorithm, bytes, sizeof bytes);
  if (algorithm.workspace_bytes > kMostWorkspace)
    throw std::invalid_argument("product: algorithm must need at most " + std::to_string(kMostWorkspace) +
                                " bytes of workspace, got " + std::to_string(algorithm.workspace_bytes));
  return algorithm;
}

}  // namespace megatron_zpp
