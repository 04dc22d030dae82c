"""From a profile of a running cluster (`diptych profile`) to its simulation."""

from collections.abc import Mapping

from cluster.sim.cluster import PoolModel, Surroundings
from cluster.spec import ClusterSpec
from workers.profiles.errors import ProfileError
from workers.profiles.measured import ClusterProfile
from workers.profiles.shapes import ModelShape


def models_measured(
    spec: ClusterSpec, profile: ClusterProfile, shape: ModelShape | None = None
) -> Mapping[str, PoolModel]:
    """By pool name. Where no KV moved, its size is the `shape`'s.

    Raises `ProfileError` for a pool that was not measured, and where nothing says how large the KV is.
    """
    token_bytes = profile.kv_token_bytes or (shape.kv_bytes_per_token if shape else 0)
    if not token_bytes:
        raise ProfileError(
            f"no KV moved when {profile.cluster} was measured, and the shape of {profile.model} is unknown"
        )
    return {
        pool.name: PoolModel(
            cost=profile.cost(pool.name),
            kv_token_bytes=token_bytes,
            context_length=profile.context_length,
            vocab_size=profile.vocab_size,
            call_s=profile.pool(pool.name).call_s,
            shape=shape,
        )
        for pool in spec.pools
    }


def surroundings(profile: ClusterProfile) -> Surroundings:
    """One machine for all workers, when neighbours were measured, and the door."""
    slowdown = {(each.pool, each.other): each.ratio for each in profile.neighbours}
    before = sum(profile.lone_s.get(phase, 0.0) for phase in ("admission", "route"))
    return Surroundings(slowdown=slowdown or None, door_s=profile.door_s + before)
