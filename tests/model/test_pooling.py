"""How an embedding model pools, as its folder says it."""

import json
from pathlib import Path

from workers.model.folder import read_pooling


def test_the_folder_says_how_it_pools(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == ""
    (tmp_path / "1_Pooling").mkdir()
    for config, found in (
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_cls_token": True}, ""),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True}, ""),
        ([], ""),
    ):
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
        assert read_pooling(tmp_path) == found
