// The ops of matrix multiplication.
#include "matmul.h"
#include "op.h"

namespace compilepass {
namespace {

constexpr int64_t kWidestExact = 65536;  // 255 * 128 * width fits an int32

Tensor int8_linear(
    const Tensor& xq, const Tensor& xscale, const Tensor& wq, const Tensor& wscale,
    std::optional<Tensor> bias, ScalarType out_dtype) {
  const bool taken = is_matrix(xq, ScalarType::Char) && is_matrix(wq, ScalarType::Char) &&
      is_matrix(xscale, ScalarType::Float) && is_matrix(wscale, ScalarType::Float) &&
      is_storage(out_dtype) && xq.size(-1) <= kWidestExact && !needs_grad(xscale, wscale) &&
      (!bias || (bias->is_cpu() && !needs_grad(*bias)));
  if (!taken) {
    return call<Tensor>(
        "compilepass_native::int8_linear", xq, xscale, wq, wscale, bias, out_dtype);
  }
  const int64_t width = xq.size(-1), rows = xq.numel() / width, columns = wq.size(0);
  STD_TORCH_CHECK(
      wq.dim() == 2 && wq.size(1) == width, "xq and wq are equally wide, not ", width, " and ",
      wq.size(-1), ".");
  STD_TORCH_CHECK(
      xscale.numel() == rows && wscale.numel() == columns && (!bias || bias->numel() == columns),
      "xscale holds a value a row of xq, wscale and bias one a row of wq.");
  const Tensor out = empty(xq, columns, out_dtype);
  const Tensor x = dense(xq), xscales = dense(xscale), w = dense(wq), wscales = dense(wscale);
  std::optional<Tensor> biases;
  if (bias) biases = dense(torch::stable::to(*bias, ScalarType::Float));
  const Int8Linear operands{
      data<int8_t>(x), data<float>(xscales), data<int8_t>(w), data<float>(wscales),
      biases ? data<float>(*biases) : nullptr, rows, width, columns};
  with_storage(out_dtype, [&](auto storage) {
    using T = decltype(storage);
    multiply(operands, mutable_data<T>(out));
  });
  return out;
}

}  // namespace

Entries linear_entries() {
  return {
      {"int8_linear", TORCH_BOX(&int8_linear)},
  };
}

}  // namespace compilepass
