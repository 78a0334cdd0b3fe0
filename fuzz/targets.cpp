// The list of fuzz targets, and the end of a run in which a property does not hold.
// Place: fuzz. One thread. A new target joins by a line here, one in target.hpp and one in
// CMakeLists.txt.
#include <cstdio>
#include <cstdlib>

#include "target.hpp"

namespace zensync::fuzz {
namespace {

// A block of 16384 slots as a bitmap takes 2 KiB; an abort at most 8 KiB.
constexpr Target kTargets[] = {{"message", run_message, message_seeds, 6000},
                               {"index", run_index, index_seeds, 5000},
                               {"frames", run_frames, frame_seeds, 9000},
                               {"mesh_record", run_mesh_record, mesh_record_seeds, 300},
                               {"faults_text", run_faults_text, faults_text_seeds, 300}};

std::uint64_t accepted_inputs = 0;

}  // namespace

std::span<const Target> all_targets() { return kTargets; }

const Target* find_target(std::string_view name) {
  for (const Target& target : kTargets) {
    if (name == target.name) return &target;
  }
  return nullptr;
}

void note_accepted() { ++accepted_inputs; }
std::uint64_t accepted() { return accepted_inputs; }

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", what);
  std::abort();
}

}  // namespace zensync::fuzz
