// The table of element types.
#include "base/dtype.h"

#include <array>

namespace pipecomm {
namespace {

struct Row {
  const char* name;
  std::size_t nbytes;
};

constexpr std::array<Row, kNumDTypes> kRows = {{
    {"uint8", 1},         {"int8", 1},        {"int16", 2},           {"int32", 4},           {"int64", 8},
    {"bool", 1},          {"float16", 2},     {"bfloat16", 2},        {"float32", 4},         {"float64", 8},
    {"complex64", 8},     {"complex128", 16}, {"uint16", 2},          {"uint32", 4},          {"uint64", 8},
    {"float8_e4m3fn", 1}, {"float8_e5m2", 1}, {"float8_e4m3fnuz", 1}, {"float8_e5m2fnuz", 1}, {"float8_e8m0fnu", 1},
}};

}  // namespace

std::size_t dtype_nbytes(DType dtype) { return kRows.at(static_cast<std::size_t>(dtype)).nbytes; }

const char* dtype_name(DType dtype) { return kRows.at(static_cast<std::size_t>(dtype)).name; }

DType dtype_from_name(const std::string& name) {
  for (std::size_t i = 0; i < kRows.size(); ++i) {
    if (name == kRows[i].name) return static_cast<DType>(i);
  }
  std::string known;
  for (const Row& row : kRows) known += (known.empty() ? "" : ", ") + std::string(row.name);
  throw Error(ErrorKind::tensor, "expected one of the dtypes " + known + "; got '" + name + "'");
}

}  // namespace pipecomm
