from logging import getLogger as init_logger
