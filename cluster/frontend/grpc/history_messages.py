"""What a gateway remembers, to protobuf. Pure."""

from collections.abc import Iterator

from cluster.frontend.grpc.messages import ledger_message
from diptych.history import Happening, Load, Recent, RequestTrace, Window
from diptych.v1 import admin_pb2
from diptych.wire import duration, duration_of

PAGE_TRAILS, PAGE_POINTS = 256, 4096  # under half a megabyte each


def put_recent(recent: Recent, message: admin_pb2.GetClusterResponse) -> None:
    message.gateway.uptime.CopyFrom(duration_of(recent.uptime_s))
    for worker, told in recent.traffic:
        message.traffic.add(
            worker=worker,
            prompts=told.prompts,
            prompt_tokens=told.prompt_tokens,
            cached_tokens=told.cached_tokens,
            output_tokens=told.output_tokens,
            transfers=told.transfers,
            transfer_bytes=told.transfer_bytes,
            transfer_time=duration_of(told.transfer_s),
            change=told.change,
            change_age=duration(told.changed_ns),
        )
    for age_s, each in recent.happenings:
        told_age = duration_of(age_s)
        message.happenings.add(
            kind=each.kind, worker=each.worker, text=each.text, request_id=each.request_id, age=told_age
        )


def pages(window: Window, gateway: str, offset_ns: int) -> Iterator[admin_pb2.TracePage]:
    """`offset_ns`: from the window's clock to the time of day. At least one page."""
    trails, happenings, loads = window.trails, window.happenings, window.loads
    while True:
        yield admin_pb2.TracePage(
            gateway=gateway,
            trails=[_trail_message(each, offset_ns) for each in trails[:PAGE_TRAILS]],
            moments=[_moment_message(each, offset_ns) for each in happenings[:PAGE_TRAILS]],
            loads=[_load_message(each, offset_ns) for each in loads[:PAGE_POINTS]],
            complete_from_unix_ns=window.whole_ns and window.whole_ns + offset_ns,
        )
        trails, happenings, loads = trails[PAGE_TRAILS:], happenings[PAGE_TRAILS:], loads[PAGE_POINTS:]
        if not (trails or happenings or loads):
            return


def _trail_message(trail: RequestTrace, offset_ns: int) -> admin_pb2.Trail:
    return admin_pb2.Trail(
        request_id=trail.request_id,
        class_name=trail.class_name,
        outcome=trail.outcome,
        detail=trail.detail,
        arrived_unix_ns=trail.arrived_ns + offset_ns,
        ledger=ledger_message(trail.ledger),
        phase=trail.phase,
        open_ns=trail.open_ns,
        prompt_tokens=trail.prompt_tokens,
        cached_tokens=trail.cached_tokens,
        output_tokens=trail.output_tokens,
        attempts=trail.attempts,
        prefill_worker=trail.prefill_worker,
        decode_worker=trail.decode_worker,
        moves=[admin_pb2.Move(unix_ns=at_ns + offset_ns, worker=worker) for at_ns, worker in trail.moves],
        transfer_bytes=trail.transfer_bytes,
        transfer_ns=trail.transfer_ns,
    )


def _moment_message(each: Happening, offset_ns: int) -> admin_pb2.Moment:
    at_ns = each.at_ns + offset_ns
    return admin_pb2.Moment(
        unix_ns=at_ns, kind=each.kind, worker=each.worker, text=each.text, request_id=each.request_id
    )


def _load_message(each: Load, offset_ns: int) -> admin_pb2.Load:
    return admin_pb2.Load(
        unix_ns=each.at_ns + offset_ns,
        worker=each.worker,
        running=each.running,
        waiting=each.waiting,
        queued_tokens=each.queued_tokens,
        used_blocks=each.used_blocks,
    )
