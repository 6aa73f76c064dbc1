// Which message a compute action reads and makes. Private.

#pragma once

#include <optional>

#include "megacore/pipeline/program/lowering.h"

namespace megacore::pipeline {

// The receive that a compute action waits for, or nothing when its input is local.
inline std::optional<ProgramStep> receive_of(const Action& action, const Placement& placement) {
  const bool forward = action.kind == ActionKind::kForward;
  if (!forward && !gives_input_gradient(action.kind)) return std::nullopt;
  const int from = forward ? placement.previous(action.stage) : placement.next(action.stage);
  if (from < 0 || placement.rank_of(from) == placement.rank_of(action.stage)) return std::nullopt;
  const ActionKind kind = forward ? ActionKind::kRecvForward : ActionKind::kRecvBackward;
  return ProgramStep{.action = {action.stage, kind, action.microbatch},
                     .peer = placement.rank_of(from)};
}

// The send of what a compute action makes, or nothing when only its own rank reads it.
inline std::optional<ProgramStep> send_of(const Action& action, const Placement& placement) {
  const bool forward = action.kind == ActionKind::kForward;
  if (!forward && !gives_input_gradient(action.kind)) return std::nullopt;
  const int to = forward ? placement.next(action.stage) : placement.previous(action.stage);
  if (to < 0 || placement.rank_of(to) == placement.rank_of(action.stage)) return std::nullopt;
  const ActionKind kind = forward ? ActionKind::kSendForward : ActionKind::kSendBackward;
  return ProgramStep{.action = {action.stage, kind, action.microbatch},
                     .peer = placement.rank_of(to)};
}

// The receive at the other end of a send.
inline Action receive_for(const Action& send, const Placement& placement) {
  if (send.kind == ActionKind::kSendForward) {
    return {placement.next(send.stage), ActionKind::kRecvForward, send.microbatch};
  }
  return {placement.previous(send.stage), ActionKind::kRecvBackward, send.microbatch};
}

// The compute action that makes what a send carries; a backward is named B.
inline Action maker_of(const Action& send) {
  const bool forward = send.kind == ActionKind::kSendForward;
  return {send.stage, forward ? ActionKind::kForward : ActionKind::kBackward, send.microbatch};
}

// The compute action that reads what a receive brings; a backward is named B.
inline Action reader_of(const Action& receive) {
  const bool forward = receive.kind == ActionKind::kRecvForward;
  return {receive.stage, forward ? ActionKind::kForward : ActionKind::kBackward,
          receive.microbatch};
}

}  // namespace megacore::pipeline
