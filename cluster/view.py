"""An immutable picture of the cluster: who is there and how they are doing. What policies look at."""

from diptych.view import ClusterView as ClusterView
from diptych.view import GatewayState as GatewayState
from diptych.view import GatewayView as GatewayView
from diptych.view import ModelView as ModelView
from diptych.view import PoolView as PoolView
from diptych.view import TaskFailures as TaskFailures
from diptych.view import WorkerState as WorkerState
from diptych.view import WorkerView as WorkerView
