"""A simulated cluster from a profile of a real one: the same pools, as fast, as far off, in each other's way."""

from cluster.offline.sim.cluster import PoolModel, Surroundings
from cluster.spec import ClusterSpec
from workers.profiles.measured import ClusterProfile

UNKNOWN_TOKEN_BYTES = 4  # where no KV moved, none will


def models_of(profile: ClusterProfile, spec: ClusterSpec) -> dict[str, PoolModel]:
    """By pool name. Raises `ProfileError` for a pool that was not measured."""
    return {
        pool.name: PoolModel(
            profile.cost(pool.name),
            kv_token_bytes=profile.kv_token_bytes or UNKNOWN_TOKEN_BYTES,
            context_length=profile.context_length,
            vocab_size=profile.vocab_size,
            call_s=profile.pool(pool.name).call_s,
        )
        for pool in spec.pools
    }


def surroundings_of(profile: ClusterProfile) -> Surroundings:
    """All measured workers on one machine, if any two of them were measured there side by side."""
    slowdown = {(each.pool, each.other): each.ratio for each in profile.neighbours}
    return Surroundings(slowdown or None, profile.door_s)
