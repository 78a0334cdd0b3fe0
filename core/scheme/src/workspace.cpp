// Construction of a workspace: the parts that depend on the number of ranks. Place: scheme,
// level 3. Allocates; everything else grows when it is first used.
#include "zensync/scheme/context.hpp"

namespace zensync {

Workspace::Workspace(int size)
    : split_owners(size),
      split_whole(1),
      received_push(static_cast<std::size_t>(size)),
      received_pull(static_cast<std::size_t>(size)),
      sets(static_cast<std::size_t>(size)) {
  for (auto& generation : push) generation = std::vector<MessageWriter>(received_push.size());
}

}  // namespace zensync
