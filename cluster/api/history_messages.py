"""What a gateway remembers, to protobuf and back. Pure."""

from cluster.api.messages import duration, duration_of, seconds
from cluster.history import Happening, Recent, Traffic
from diptych.v1 import admin_pb2


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


def recent_from(message: admin_pb2.GetClusterResponse) -> Recent:
    """The happenings' own times are of a clock that is not ours: 0."""
    traffic = (
        (
            told.worker,
            Traffic(
                prompts=told.prompts,
                prompt_tokens=told.prompt_tokens,
                cached_tokens=told.cached_tokens,
                output_tokens=told.output_tokens,
                transfers=told.transfers,
                transfer_bytes=told.transfer_bytes,
                transfer_s=seconds(told.transfer_time),
                change=told.change,
                changed_ns=told.change_age.ToNanoseconds(),
            ),
        )
        for told in message.traffic
    )
    happenings = (
        (seconds(each.age), Happening(0, each.kind, each.worker, each.text, each.request_id))
        for each in message.happenings
    )
    return Recent(seconds(message.gateway.uptime), tuple(traffic), tuple(happenings))
