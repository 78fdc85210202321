// The ops of rotary position embedding.
#include "op.h"
#include "rotary.h"

namespace compilepass {
namespace {

// The tensor itself where the elements of a row are adjacent.
Tensor with_dense_rows(const Tensor& t) {
  return t.size(-1) <= 1 || t.stride(t.dim() - 1) == 1 ? t : dense(t);
}

// The strides of a table along the leading dims of x: 0 where it has one row for all of them.
// `skipped` dims of x, the last of the leading ones, are not among the table's.
std::vector<int64_t> table_strides(const Tensor& table, const Tensor& x, int64_t skipped) {
  const int64_t leading = x.dim() - 1 - skipped, own = table.dim() - 1;
  STD_TORCH_CHECK(own <= leading, "cos and sin have no more dimensions than x.");
  std::vector<int64_t> strides(x.dim() - 1, 0);
  for (int64_t d = 0; d < own; ++d) {
    const int64_t at = leading - own + d, size = table.size(d);
    STD_TORCH_CHECK(size == 1 || size == x.size(at), "cos and sin broadcast against x.");
    strides[at] = size == 1 ? 0 : table.stride(d);
  }
  return strides;
}

Tensor rotated(
    const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t skipped, bool interleaved,
    bool per_pair, bool wide) {
  STD_TORCH_CHECK(
      cos.dim() > 0 && sin.dim() > 0 && cos.size(-1) == sin.size(-1), "cos and sin are equally wide.");
  const int64_t width = x.size(-1), turned = cos.size(-1) * (per_pair ? 2 : 1);
  STD_TORCH_CHECK(
      turned % 2 == 0 && turned <= width,
      "cos and sin hold a value for what is rotated of a row of ", width, " elements.");
  const Tensor out = empty(x, width, x.scalar_type());
  const Tensor rows = with_dense_rows(x), c = with_dense_rows(cos), s = with_dense_rows(sin);
  const auto sizes = x.sizes(), strides = rows.strides();
  Lead lead{{sizes.begin(), sizes.end() - 1}, {}};
  lead.strides = {
      std::vector<int64_t>(strides.begin(), strides.end() - 1), table_strides(c, x, skipped),
      table_strides(s, x, skipped)};
  with_storage(x.scalar_type(), [&](auto storage) {
    using T = decltype(storage);
    const Rotation<T> rotation{
        data<T>(rows), data<T>(c), data<T>(s), mutable_data<T>(out), width, turned};
    rotate_rows(rotation, lead, x.numel() / width, interleaved, per_pair, wide);
  });
  return out;
}

Tensor rotate(
    const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved, bool per_pair,
    bool wide) {
  if (!takes(x, cos, sin)) {
    return call<Tensor>("compilepass_native::rotate", x, cos, sin, interleaved, per_pair, wide);
  }
  return rotated(x, cos, sin, 0, interleaved, per_pair, wide);
}

std::tuple<Tensor, Tensor> rotary_embedding(
    const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, bool interleaved) {
  const bool taken = takes(q, k) && q.dim() > 1 && k.dim() > 1 && cos.is_cpu() && sin.is_cpu() &&
      is_storage(cos.scalar_type()) && is_storage(sin.scalar_type()) && is_matrix(k, k.scalar_type()) &&
      !needs_grad(cos, sin);
  if (!taken) {
    return call<std::tuple<Tensor, Tensor>>(
        "compilepass_native::rotary_embedding", q, k, cos, sin, interleaved);
  }
  const ScalarType dtype = q.scalar_type();
  const Tensor c = cos.scalar_type() == dtype ? cos : torch::stable::to(cos, dtype);
  const Tensor s = sin.scalar_type() == dtype ? sin : torch::stable::to(sin, dtype);
  return {
      rotated(q, c, s, 1, interleaved, true, false), rotated(k, c, s, 1, interleaved, true, false)};
}

}  // namespace

Entries rotary_entries() {
  return {
      {"rotary_embedding", TORCH_BOX(&rotary_embedding)},
      {"rotate", TORCH_BOX(&rotate)},
  };
}

}  // namespace compilepass
