"""A page of TensorBoard's own server that opens it with the numbers of the table.

TensorBoard smooths curves, and leaves a twentieth of a chart's points outside at its top and at its
bottom. An address can switch off the first. The second is a setting that the browser keeps for the
pages of one server, so a page of that server has to change it. TensorBoard finds the plugin by the
entry point `tensorboard_plugins` of an installed mprun.
"""

import base64
import hashlib
from collections.abc import Callable

from tensorboard.backend.http_util import Respond
from tensorboard.plugins.base_plugin import TBPlugin
from werkzeug.wrappers import Request

from mprun.record.console import UNSMOOTHED

# `_tb_global_settings` is read by Time Series, `_ignoreYOutliers` by Scalars and Custom Scalars.
_SCRIPT = """
const key = "_tb_global_settings", kept = JSON.parse(localStorage.getItem(key) || "{}");
localStorage.setItem(key, JSON.stringify({ ...kept, ignoreOutliers: false }));
localStorage.setItem("_ignoreYOutliers", "false");
location.replace(new URL("../../../UNSMOOTHED", location.href));
""".replace("UNSMOOTHED", UNSMOOTHED)


class TablePlugin(TBPlugin):
    """A plugin without a tab of its own."""

    plugin_name = "mprun"

    def get_plugin_apps(self) -> dict[str, Callable]:
        """Return the page by its place behind the plugin's address, `data/plugin/mprun`."""
        return {"/table": _page}

    def is_active(self) -> bool:
        """Return False: there is no tab to be shown."""
        return False


@Request.application
def _page(request: Request):
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    content = f"<!doctype html><title>TensorBoard</title><script>{_SCRIPT}</script>"
    return Respond(request, content, "text/html", csp_scripts_sha256s=[digest])
