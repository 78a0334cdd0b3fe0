// Writes the seed corpora: fuzz_seeds FOLDER makes FOLDER/TARGET/NUMBER for every target, and
// prints one line per target: its name and the longest input that makes sense. Place: fuzz.
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "target.hpp"

int main(int count, char** arguments) {
  if (count != 2) {
    std::fputs("usage: fuzz_seeds FOLDER\n", stderr);
    return 2;
  }
  for (const zensync::fuzz::Target& target : zensync::fuzz::all_targets()) {
    const auto folder = std::filesystem::path(arguments[1]) / target.name;
    std::filesystem::create_directories(folder);
    int number = 0;
    for (const zensync::fuzz::Bytes& seed : target.seeds()) {
      std::ofstream file(folder / std::to_string(number++), std::ios::binary);
      file.write(reinterpret_cast<const char*>(seed.data()),
                 static_cast<std::streamsize>(seed.size()));
      if (!file.flush()) return 1;
    }
    std::printf("%s %zu\n", target.name, target.most_bytes);
  }
  return 0;
}
