from nanoinfer.compat.moved_modules import pass_on

pass_on(__name__)
