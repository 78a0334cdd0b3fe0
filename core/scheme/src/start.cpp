// Which scheme a plan means. Place: scheme, level 3.
// A scheme is a coroutine: it runs nothing before its first `next()`, and refers to the context,
// which is the caller's. Fails with std::bad_alloc only (its frame).
#include "zensync/scheme/context.hpp"

namespace zensync {

SchemeTask start_scheme(SchemeContext& context) {
  switch (context.plan.scheme) {
    case SchemeId::kRecursiveDoubling:
      return recursive_doubling(context);
    case SchemeId::kAgSparse:
      return agsparse(context);
    case SchemeId::kDenseRing:
      return dense_ring(context);
    default:
      return balanced(context);
  }
}

}  // namespace zensync
