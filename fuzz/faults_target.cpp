// Plans of faults as text. Place: fuzz. Input: the text.
// Properties: what is read is written and read again as the same faults; an error is kInvalid and
// says which fault it is about; kinds and values stay in their ranges.
#include "target.hpp"
#include "zensync/driver/faulty.hpp"

namespace zensync::fuzz {
namespace {

void require_in_range(const Fault& fault) {
  require(static_cast<int>(fault.kind) < kFaultKinds, "the kind is one");
  require(fault.exchange >= -1 && fault.peer.value >= -1, "numbers are −1 or more");
  require(fault.mask != 0 && fault.bytes != 0, "a fault has an effect");
  require(fault.delay.count() >= 0, "a delay is not negative");
}

}  // namespace

void run_faults_text(std::span<const std::byte> bytes) {
  const auto plan = parse_faults(Input(bytes).text());
  if (!plan.ok()) {
    require(plan.error().kind == ErrorKind::kInvalid, "the error is of its kind");
    require(plan.error().message.starts_with("fault "), "the error says which fault");
    return;
  }
  const std::string text = faults_text(plan.value().faults);
  const auto back = parse_faults(text);
  require(back.ok(), "what was written can be read");
  require(faults_text(back.value().faults) == text, "a plan comes back");
  require(back.value().faults.size() == plan.value().faults.size(), "no fault is lost");
  for (const Fault& fault : plan.value().faults) require_in_range(fault);
  note_accepted();
}

Corpus faults_text_seeds() {
  Corpus corpus;
  for (const char* text :
       {"", "drop", "delay:ms=20;truncate:exchange=0,bytes=3;duplicate", "reorder:peer=all;drop;",
        "corrupt:exchange=1,peer=2,offset=40,mask=0x80", "die:exchange=3,after=1,how=signal",
        "drop:exchange=every,peer=0; die:how=vanish", "explode:all=1"}) {
    Bytes bytes;
    corpus.push_back(put_text(bytes, text));
  }
  return corpus;
}

}  // namespace zensync::fuzz
