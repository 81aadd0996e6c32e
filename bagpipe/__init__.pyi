from bagpipe import optim as optim
from bagpipe import serving as serving
from bagpipe.client.access import Cacher as Cacher
from bagpipe.dense.precondition.optimizer import KfacOptimizer as KfacOptimizer
from bagpipe.errors import CapacityError as CapacityError
from bagpipe.errors import InputError as InputError
from bagpipe.errors import JobError as JobError
from bagpipe.errors import PeerError as PeerError
from bagpipe.errors import StoreError as StoreError
from bagpipe.train_pipeline.pipeline import TrainPipeline as TrainPipeline

__version__: str
