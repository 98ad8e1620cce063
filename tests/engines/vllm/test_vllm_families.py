"""Models whose loaders do what others' do not."""

from rollouts import running_engine
from test_vllm import read_by_a_plain_process

from torch_ros.integrations.vllm import attach


def followed(engine, train, endpoint, versions=(1, 2, 3), **how):
    """The trainer and what it published last, which the engine has."""
    trainer = train(engine.path, f"family-{how.get('replica')}", digests="full")
    options = {"endpoint": endpoint, "digests": "full"}
    with attach(engine.llm, model=trainer.name, options=options, **how) as policy:
        for version in versions:
            published = trainer.publish(version, names="checkpoint")
            assert policy.update()
            engine.agrees(published)
        yield trainer, published


def test_experts_with_a_biased_router_are_a_source_once_they_are_proven(tiny, train, etcd_endpoint):
    """The bias has two names in the engine: the router's, and the experts'."""
    with running_engine(tiny("biased router")) as engine:
        how = {"replica": "biased", "direct": "proven"}
        for trainer, published in followed(engine, train, etcd_endpoint, **how):
            (report,) = engine.reports()
            assert report.direct_share == 1, report
            trainer.kill()
            found, source = read_by_a_plain_process(trainer.name, etcd_endpoint, published)
            assert (found, source) == (published["digest"], "biased")


def test_gpt_oss_writes_past_its_loaders_and_is_loaded(tiny, train, etcd_endpoint):
    """With vLLM's own kernels: the plug-in of these tests knows another activation only."""
    with running_engine(tiny("gpt-oss"), plain=False) as engine:
        for direct in ("never", "proven"):
            how = {"replica": f"oss-{direct}", "direct": direct}
            for _ in followed(engine, train, etcd_endpoint, **how):
                (report,) = engine.reports()
                assert report.staged
