// What ranks of a native mesh publish: records and tokens, as text from a store that anybody may
// write to. Place: fuzz. Input: the text.
// Properties: what is read is written and read again as the same; an error is kCorruptMessage and
// names the rank; digests and the topology take any record.
#include "mesh_records.hpp"
#include "target.hpp"

namespace zensync::fuzz {
namespace {

using namespace driver;  // NOLINT(google-build-using-namespace): what is tested

bool same(const MeshRecord& a, const MeshRecord& b) {
  return a.format == b.format && a.address == b.address && a.port == b.port &&
         a.host_id == b.host_id && a.settings == b.settings;
}

void run_record(const std::string& text) {
  const auto record = parse_record(text, Rank{2});
  if (!record.ok()) {
    require(record.error().kind == ErrorKind::kCorruptMessage, "the error is of its kind");
    require(record.error().culprit.value == 2, "the error names the rank");
    return;
  }
  const std::string again = record_text(record.value());
  const auto back = parse_record(again, Rank{2});
  require(back.ok() && same(back.value(), record.value()), "a record comes back");
  require(settings_digest(back.value()) == settings_digest(record.value()), "so does its digest");
  require(topology_of({record.value(), MeshRecord(), back.value()}).size() == 3,
          "every rank has a place");
  note_accepted();
}

void run_token(const std::string& text) {
  Token token{};
  if (!parse_token(text, token)) return;
  require(text.size() == 2 * kTokenBytes, "a token has its length");
  Token back{};
  require(parse_token(token_text(token), back) && equal_tokens(token, back), "a token comes back");
  note_accepted();
}

}  // namespace

void run_mesh_record(std::span<const std::byte> bytes) {
  const std::string text = Input(bytes).text();
  run_record(text);
  run_token(text);
}

Corpus mesh_record_seeds() {
  Corpus corpus;
  for (const char* text : {"zensync mesh version 1, little-endian, n = "
                           "2\n127.0.0.1\n45123\nboot/4026531840\ncodec=auto",
                           "f\n::1\n0\n\n", "f\na\n65535\nh\nsettings\nof\nmany lines\n",
                           "\n\n1\n\n", "f\na\n65536\nh\ns", "0123456789abcdef0123456789ABCDEF",
                           "0123456789abcdef0123456789abcdeg"}) {
    Bytes bytes;
    corpus.push_back(put_text(bytes, text));
  }
  return corpus;
}

}  // namespace zensync::fuzz
